"""Which kernels a device would choose, and what memory they take, where the device itself is not there."""
