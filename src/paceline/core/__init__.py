"""What every room uses and no model knows: errors, files, processes, the machine's limits."""
