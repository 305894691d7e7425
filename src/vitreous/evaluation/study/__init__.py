"""Whole data sets: a study cut into shards, run on one machine or on Ray, stored, and read back."""
