"""What steps cost on this machine, and why a run was as fast as it was."""
