"""Compute many maps and keep the most faithful one."""
