"""Write the C files of an export."""
