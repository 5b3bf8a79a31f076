"""Compile every kernel for a GPU that need not be there, and look at what it became.

As a program (80, 90: the compute capability) it prints, as JSON, what is wrong with each kernel:
instructions that fuse, approximate or flush denormals, which would change bits, and numbers read
or written one by one where addresses allow more.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

__all__ = ["main"]

WRONG = re.compile(r"\b(?:fma|mad)\.r\w\S*\.f\d+|\S+\.ftz\S*|\S+\.approx\S*|div\.full\S*")
GUARDED = {"div.rn.ftz.f32", "sqrt.rn.ftz.f32"}  # of older Tritons; see `triton.arithmetic`
POINTERS = {
    "base": "*i16",
    "table": "*i64",
    "refused": "*i32",
    "order": "*i32",
    "out": "*u8",
    "data": "*u8",
}
VECTORS = (
    *("low", "high", "inverse", "scale", "row", "limits", "signs", "root", "upper", "cuts"),
    *("levels", "heads"),
)
FLOATS = ("limit", "top", "share")
SIXTEENS = ("pitch", "s_token", "s_head", "dim", "groups", "size")
BATCH = {"ALIGN": 8, "BF16": True, "F16": False, "ITEM": 2, "MINIMA": True, "BLOCK": 512}
TILE = {
    "ROWS": 16,
    "DIM": 128,
    "TOKENS": 32,
    "PIECES": 2,
    "PLACES": 2,
    "SIZE": 64,
    "SHIFT": 0,
    "UP": False,
}
FIELD = {"WIDTH": 4, "WIDTH_2": 0, "LOG": 7, "HEIGHTS": 8, "CUTS": 15}
KERNELS = {
    "groups": ("extremes_by_channel", "extremes_by_row", "codes", "values"),
    "settling": (
        *("rows", "ranges", "ranges_in", "magnitudes", "magnitudes_in"),
        *("widths", "steps", "steps_in"),
    ),
    "rotation": ("fit", "levels_out", "levels_in"),
}
WIDE = ("extremes_by_channel", "extremes_by_row", "codes", "values", "fit", "levels_out")


def ptx(kernel: Any, target: int, **more: Any) -> str:
    """Assembly of a kernel for 16-byte aligned bfloat16 with rows of 128."""
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-not-found, import-untyped, unused-ignore]

    how = {**BATCH, **TILE, **FIELD, **more}
    names = kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    aligned: dict[tuple[int], Any] = {}
    for at, name in enumerate(names):
        pointer = name in POINTERS or name in VECTORS or (name == "step" and "low" in names)
        if name in how or name == "s_dim":
            signature[name], constants[at,] = "constexpr", how.get(name, 1)
        elif name in FLOATS:
            signature[name] = "fp32"
        elif pointer or (name == "step" and "signs" in names):
            signature[name] = POINTERS.get(name, "*fp32")
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or (signature[name] == "i32" and name in SIXTEENS):
            aligned[at,] = [["tt.divisibility", 16]]
    if kernel.fn.__name__ in ("_codes", "_values"):  # there it is a number
        signature["step"] = "i32"
        aligned.pop((names.index("step"),), None)
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return str(made.asm["ptx"])


def main(target: int) -> dict[str, list[str]]:
    """Compile everything; by kernel what is wrong."""
    from tierkv_codecs.triton import groups, rotation, settling

    modules = {"groups": groups, "rotation": rotation, "settling": settling}
    found: dict[str, list[str]] = {}
    for module, names in KERNELS.items():
        for name in names:
            kernel = getattr(modules[module], name)
            ways: list[dict[str, Any]] = [{}]
            if "FLOAT8" in kernel.arg_names:
                ways = [
                    {"BY_CHANNEL": channel, "FLOAT8": eight, "WIDTH": 8 if eight else 4}
                    for channel in (False, True)
                    for eight in (False, True)
                ]
            for way in ways:
                text = ptx(kernel, target, **way)
                wrong = sorted(set(WRONG.findall(text)) - GUARDED)
                if name in WIDE and "ld.global.v" not in text:
                    wrong.append("numbers are read one by one")
                if name in ("values", "levels_in") and "st.global.v" not in text:
                    wrong.append("numbers are written one by one")
                found[f"{name} {way or ''}".strip()] = wrong
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
