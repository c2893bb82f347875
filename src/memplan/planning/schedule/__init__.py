"""Choices -> what runs when; its Timeline; its code."""
