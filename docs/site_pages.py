"""MkDocs hook: pages for the API (one for every folder of modules) and for the notebooks, nav entries for all that
mkdocs.yml does not name, and docs/schemes.md written again. A new module, scheme, notebook or guide needs no entry."""

import ast
import base64
import json
from pathlib import Path

import scheme_page
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PACKAGES = "nagjax", "pallas_kernels"
APART = {"nagjax/commands"}  # what the command line calls; `nagjax COMMAND --help` documents it


def on_config(config):
    nav = config.nav
    named = json.dumps(nav)
    guides = sorted(path.name for path in (ROOT / "docs").glob("*.md") if f'"{path.name}"' not in named)
    next(part["Guides"] for part in nav if "Guides" in part).extend(guides)
    nav.append({"Notebooks": [f"notebooks/{path.stem}.md" for path in notebooks()]})
    nav.append({"API": [f"api/{name}.md" for name in folders()]})
    return config


def on_pre_build(config):
    scheme_page.write()


def on_files(files, config):
    for name, modules in folders().items():
        content = f"# {name}\n\n" + "\n".join(directive(*each) for each in modules.items())
        files.append(File.generated(config, f"api/{name}.md", content=content))
    for path in notebooks():
        page, pictures = notebook_page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def directive(module: str, path: Path) -> str:
    """What mkdocstrings is told about a module: of a folder's own, only what it does not import from the others."""
    if path.stem != "__init__":
        return f"::: {module}\n"
    kinds = ast.FunctionDef | ast.ClassDef
    own = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds) and node.name[0] != "_"]
    return f"::: {module}\n    options:\n      members: {json.dumps(own) if own else 'false'}\n"


def folders() -> dict[str, dict[str, Path]]:
    """Documented modules and their files by the dotted name of their folder, the folder's own first."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            folder = path.parent.relative_to(ROOT).as_posix()
            if folder in APART or path.stem == "__main__" or not ast.get_docstring(ast.parse(path.read_text())):
                continue
            name = folder.replace("/", ".")
            module = name if path.stem == "__init__" else f"{name}.{path.stem}"
            found.setdefault(name, {})[module] = path
    return {name: dict(sorted(found[name].items())) for name in sorted(found)}


def notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(".ipynb)", ".md)"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Output of the cell above]({name})")
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
