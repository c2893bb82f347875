"""Replay a recorded step from its ops alone, with other arguments, for the bytes of its storages."""
