"""Tests of a step's memory: against an upper limit, or against a baseline in version control."""
