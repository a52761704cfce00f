"""Write every picture stored in the pages to _build/pictures/NN/, to be looked at: python tools/pictures.py [NN ...]"""

import base64
import sys

import nbformat

from notebooks import ROOT, pages

for path in pages(sys.argv[1:]):
    folder = ROOT / "_build" / "pictures" / path.name[:2]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for cell in nbformat.read(path, as_version=4).cells:
        for k, output in enumerate(cell.get("outputs", [])):
            if "image/png" in output.get("data", {}):
                file = folder / f"{cell.execution_count:03d}_{k}.png"
                file.write_bytes(base64.b64decode(output["data"]["image/png"]))
                print(file.relative_to(ROOT))
