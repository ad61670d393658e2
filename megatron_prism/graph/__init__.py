"""The world graph: classes of ranks, how their calls match, where a job stalls."""
