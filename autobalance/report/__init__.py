"""Profiles and plans as tables for people."""
