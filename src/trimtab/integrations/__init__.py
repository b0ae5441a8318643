"""Hosts and services that trimtab is used with; each module adapts one, and imports it."""
