"""The commands, each a module: its options, what it does in which order, and what it says."""
