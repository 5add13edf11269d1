"""`python -m experiments`: every recipe, its claim, and its sizes."""

import argparse

from experiments.harness.recipe import load, names

parser = argparse.ArgumentParser("python -m experiments", description="Lists the recipes, each with its command.")
parser.parse_args()
for name in names():
    recipe = load(name)
    print(f"{name}  ({', '.join(recipe.sizes)})\n    {recipe.header['claim']}\n    {recipe.header['command']}\n")
