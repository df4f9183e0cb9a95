"""Every package behind `electra` as it is installed here, in the form of CycloneDX 1.6.

    python docs/sbom.py > sbom.json

Of each: version, licence, what it needs, and the SHA-256 of its RECORD, which has the SHA-256 of
each of its files. Packages of extras are in it where they are installed.
"""

import hashlib
import importlib.metadata as metadata
import json
import re
import sys
from typing import Any

from packaging.requirements import Requirement


def sbom(root: str = "electra") -> dict[str, Any]:
    """Of `root` and all that it needs, itself or by one of its extras."""
    extras = metadata.metadata(root).get_all("Provides-Extra") or []
    waiting = [Requirement(f"{root}[{','.join(extras)}]")]
    found: dict[str, metadata.Distribution] = {}
    edges: dict[str, set[str]] = {}
    while waiting:
        wanted = waiting.pop()
        try:
            package = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:  # of an extra that is not installed
            continue
        name, more = canonical(package.name), needs(package, wanted.extras)
        names = {canonical(other.name) for other in more}
        if name not in found or not names <= edges[name]:
            found[name] = package
            edges.setdefault(name, set()).update(names)
            waiting += more
    reference = {name: purl(package) for name, package in found.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(found[root]) | {"type": "application"}},
        "components": [component(found[name]) for name in sorted(found) if name != root],
        "dependencies": [
            {"ref": reference[name], "dependsOn": [reference[n] for n in sorted(to & found.keys())]}
            for name, to in sorted(edges.items())
        ],
    }


def needs(package: metadata.Distribution, extras: set[str]) -> list[Requirement]:
    """What it asks for on this machine with these extras."""
    lines = map(Requirement, package.requires or [])
    return [
        line
        for line in lines
        if line.marker is None
        or any(line.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def component(package: metadata.Distribution) -> dict[str, Any]:
    told = package.metadata
    licence = told.get("License-Expression") or told.get("License") or ""
    classifiers = [c for c in told.get_all("Classifier") or [] if c.startswith("License ::")]
    if classifiers and (not licence or "\n" in licence):  # some give the whole text
        licence = classifiers[0].rsplit(" :: ", 1)[-1]
    record = hashlib.sha256((package.read_text("RECORD") or "").encode()).hexdigest()
    return {
        "type": "library",
        "bom-ref": purl(package),
        "name": package.name,
        "version": package.version,
        "purl": purl(package),
        "licenses": [{"license": {"name": licence.partition("\n")[0] or "unknown"}}],
        "properties": [{"name": "electra:sha256-of-RECORD", "value": record}],
    }


def purl(package: metadata.Distribution) -> str:
    return f"pkg:pypi/{canonical(package.name)}@{package.version}"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    json.dump(sbom(), sys.stdout, indent=1)
