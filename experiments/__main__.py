"""`python -m experiments`: every recipe, its claim, and its sizes."""

from experiments.harness.recipe import load, names

for name in names():
    recipe = load(name)
    print(f"{name}  ({', '.join(recipe.sizes)})\n    {recipe.header['claim']}\n    {recipe.header['command']}\n")
