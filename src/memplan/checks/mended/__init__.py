"""What a mended step takes: recorded anew, or simulated with other lives of its storages."""
