"""A whole job: each rank that its world needs is captured.

script_job.py     a stock script
recipe_job.py     a recipe: its flags, its ranks
recipe_script.py  the script that a recipe's ranks run: the smallest training loop
estimate.py       what a job needs, said while it is captured
short_job.py      the same job with few layers, from which the estimate follows
"""
