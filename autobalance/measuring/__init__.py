"""Real passes on real devices: what blocks take when they run, one at a time, and how fast a device is."""
