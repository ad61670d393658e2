"""Peak memory of every class of ranks, from programs alone, and baselines that guard it."""
