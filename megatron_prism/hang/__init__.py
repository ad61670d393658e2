"""Who made a job hang: dumps or programs in, a verdict out; faults to plant."""
