"""`python -m experiments`: every recipe, its claim, and its sizes."""

import argparse
import sys

from experiments.harness.recipe import load, names
from nagjax.errors import UserError

parser = argparse.ArgumentParser("python -m experiments", description="Lists the recipes, each with its command.")
parser.parse_args()
try:
    recipes = [load(name) for name in names()]
except UserError as error:
    sys.exit(f"experiments: error: {error}")
for recipe in recipes:
    print(f"{recipe.name}  ({', '.join(recipe.sizes)})\n    {recipe.header['claim']}\n    {recipe.header['command']}\n")
