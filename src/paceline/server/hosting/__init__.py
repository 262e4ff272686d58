"""Models that are served: loaded when they are asked for, within the memory there is."""
