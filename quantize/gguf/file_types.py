"""The types that a GGUF file can have as a whole, and the block type that gives each its name."""

from __future__ import annotations

from ...kernels.errors import UserError, did_you_mean

FILE_TYPES = {  # by name: general.file_type
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20,
    "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25,
    "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38,
}  # fmt: skip
BASE_TYPES = {  # of most matrices, where it is not the file type's own name
    **{f"Q3_K_{size}": "Q3_K" for size in "SML"},
    **{f"Q{bits}_K_{size}": f"Q{bits}_K" for bits in "45" for size in "SM"},
    "Q2_K_S": "Q2_K", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S",
    "MXFP4_MOE": "MXFP4",
}  # fmt: skip
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def check_file_type(file_type: str) -> str:
    """`file_type` in its usual spelling; UserError when there is none such."""
    name = ALIASES.get(file_type.upper(), file_type.upper())
    if name not in FILE_TYPES:
        hint = did_you_mean(name, FILE_TYPES)
        raise UserError(f"unknown GGUF type '{file_type}'{hint}; known: {', '.join(FILE_TYPES)}")
    return name


def base_type(file_type: str) -> str:
    """The block type of most matrices of a file."""
    return BASE_TYPES.get(file_type, file_type)
