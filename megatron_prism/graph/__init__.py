"""The world graph: classes of ranks, how calls match, where a job stalls, how two runs differ."""
