"""The device seam: everything that touches a device goes through one :class:`~.base.Ops`."""
