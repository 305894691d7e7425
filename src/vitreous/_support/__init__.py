"""Helpers that know nothing about models."""
