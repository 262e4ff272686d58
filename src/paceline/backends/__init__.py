"""The devices that forwards run on, behind one interface."""
