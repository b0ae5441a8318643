"""Energy meters: NVML, RAPL and Zeus, and the selection of one."""
