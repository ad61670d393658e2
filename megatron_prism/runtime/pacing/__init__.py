"""Virtual ranks that answer on time, on GPUs."""
