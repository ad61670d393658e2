"""What everything is made of: world, groups, collectives, programs, recipes, errors; no torch."""
