"""Which installed distributions are permissively licensed, by an allow-list."""

from __future__ import annotations

import re
from importlib.metadata import PackageMetadata

# SPDX identifiers, lower case.
ALLOWED = frozenset(
    """0bsd apache-2.0 apache-2.0-with-llvm-exception blueoak-1.0.0 bsd-2-clause bsd-3-clause
    bsl-1.0 cc0-1.0 hpnd isc mit mit-0 mit-cmu ncsa psf-2.0 python-2.0 python-2.0.1 unlicense zlib
    """.split()
)
# Trove classifiers (their last part) and free-text License fields, lower case.
NAMES = {
    "mit license": "MIT",
    "mit": "MIT",
    "the mit license": "MIT",
    "expat": "MIT",
    "bsd license": "BSD",
    "bsd": "BSD",
    "new bsd": "BSD-3-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "modified bsd license": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "apache software license": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "python software foundation license": "PSF-2.0",
    "psf": "PSF-2.0",
    "psf-2.0": "PSF-2.0",
    "isc license (iscl)": "ISC",
    "isc": "ISC",
    "isc license": "ISC",
    "the unlicense (unlicense)": "Unlicense",
    "unlicense": "Unlicense",
    "zlib/libpng license": "Zlib",
    "zero-clause bsd (0bsd)": "0BSD",
    "historical permission notice and disclaimer (hpnd)": "HPND",
    "mit no attribution license (mit-0)": "MIT-0",
    "university of illinois/ncsa open source license": "NCSA",
    "boost software license 1.0 (bsl-1.0)": "BSL-1.0",
}
COPYLEFT = re.compile(
    rb"\b[AL]?GPL|General Public Licen|Mozilla Public|\bMPL\b|\bEUPL\b|Creative Commons|\bCC[- ]BY"
    rb"|SPDX-License-Identifier: (?!Apache|MIT|BSD|ISC|PSF|0BSD|Zlib|Unlicense|CC0)",
    re.IGNORECASE,
)


def permissive_licence(metadata: PackageMetadata) -> str | None:
    """The licence of a distribution if the allow-list has it, else None (unknown is refused).

    Read in this order: License-Expression (SPDX), the licence classifiers, the License field.
    """
    expression = _field(metadata, "License-Expression")
    if expression:
        return expression if _expression_allowed(expression) else None
    classifiers = [
        value.rpartition("::")[2].strip()
        for value in metadata.get_all("Classifier") or []
        if value.startswith("License ::")
    ]
    classifiers = [value for value in classifiers if value.lower() != "osi approved"]
    free_text = _field(metadata, "License")
    if len(free_text) < 64 and COPYLEFT.search(free_text.encode()):
        return None
    if classifiers:
        known = [NAMES.get(value.lower()) for value in classifiers]
        return " OR ".join(sorted(set(filter(None, known)))) if all(known) else None
    if free_text.lower() in NAMES:
        return NAMES[free_text.lower()]
    return free_text if _expression_allowed(free_text) else None


def _field(metadata: PackageMetadata, name: str) -> str:
    return ((metadata.get_all(name) or [""])[0] or "").strip()


def _expression_allowed(expression: str) -> bool:
    """Whether some alternative of a flat SPDX expression is allowed; with brackets, whether all."""
    text = expression.lower().strip().replace(" with ", "-with-")
    if "(" in text:
        text = re.sub(r"[()]", " ", text).replace(" or ", " and ")
    alternatives = re.split(r"\s+or\s+", text)
    return any(
        all(term.strip() in ALLOWED for term in re.split(r"\s+and\s+", alternative))
        for alternative in alternatives
    )


def file_is_copyleft(head: bytes) -> bool:
    """Whether the first bytes of a file name a copyleft licence, whatever its package says."""
    return COPYLEFT.search(head) is not None
