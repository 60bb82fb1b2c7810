"""Every Triton kernel of the repository is compiled ahead of time by some test_aot_*.py."""

from __future__ import annotations

from pathlib import Path

from aot import missing_kernels


def test_aot_cases_launch_every_kernel(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    files = [path for path in sorted(folder.glob("test_aot_*.py")) if path != Path(__file__)]
    missing, kernels = missing_kernels(files, tmp_path)
    # The walk finds kernels at all.
    assert "paged_prefill_attention_triton._prefill_kernel" in kernels
    assert not missing, f"no AOT case launches {missing}"
