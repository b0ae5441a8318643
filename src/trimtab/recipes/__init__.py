"""PEERS: the hand-written loops a plan is compared with. Plain torch, none of trimtab's runtime; each file runs."""
