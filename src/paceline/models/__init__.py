"""What a decoder is: its shape, weights and layers, and the interface of backends."""
