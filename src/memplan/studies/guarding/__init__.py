"""What a step may take: an upper limit, or a baseline that is kept beside the code."""
