"""``megabucket report`` and ``megabucket simulate`` give the same figures for the same config."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megabucket.cli.main import app

# Output 15.5.2: a flat link and pinned tensors.
TENSORS = """
link: {latency_s: 1.4e-3, seconds_per_byte: 2.375e-10}
sweep: {bucket_numel: [25M, 300k, 4M]}
workload:
  tensors:
    - {name: embedding, numel: 30000000, backward_s: 0.036}
    - {name: mixer, numel: 20000000, backward_s: 0.024}
    - {name: small, numel: 900000, backward_s: 0.00108, forward_s: 0.0005}
    - {name: head, numel: 300000, backward_s: 0.00036}
"""
MODEL = """
mode: reduce_scatter
model: {kind: gpt, vocab_size: 256, sequence_length: 16, num_layers: 3, hidden_size: 16, num_heads: 2, dtype: bfloat16}
ddp: {overlap_param_gather: true, bucket_size: 3000}
link: {kind: ring, latency_s: 1e-5, bytes_per_s: 1e9}
workload: {tokens_per_microbatch: 64, flops_per_s: 1e9, optimizer_s: 1e-4}
"""


def _figures(tmp_path, config, *arguments):
    path = tmp_path / "run.yaml"
    path.write_text(config)
    answers = []
    for command in (["report", "--out", str(tmp_path / "report.html"), "--json"], ["simulate", "--json"]):
        result = CliRunner().invoke(app, [*command, "-c", str(path), *arguments])
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout))
    return answers


@pytest.mark.parametrize(("config", "arguments"), [(TENSORS, ()), (TENSORS, ("--dp-size", "8")), (MODEL, ("--dp-size", "4"))])
def test_both_commands_give_the_same_figures(tmp_path, config, arguments):
    reported, simulated = _figures(tmp_path, config, *arguments)

    plans = {plan["key"]: plan for plan in reported["plans"]}
    assert reported["rows"] == simulated["rows"]
    assert {name: plans["optimal"][name] for name in simulated["optimal"]} == simulated["optimal"]
    for name in ("dp_size", "mode", "overlap_grad_reduce", "overlap_param_gather", "no_overlap_s", "lower_bound_s"):
        assert reported[name] == simulated[name]
    assert reported["compute_s"] == simulated["compute_s"]


def test_plans_and_scaling_of_a_model_are_the_same_too(tmp_path):
    reported, simulated = _figures(tmp_path, MODEL, "--dp-size", "4")

    plans = {plan["key"]: plan for plan in reported["plans"]}
    for ours, theirs in (("default", "default"), ("config", "configured")):
        names = ("buckets", "step_s", "exposed_s")
        assert {name: plans[ours][name] for name in names} == {name: simulated[theirs][name] for name in names}
    assert [row["optimal"] for row in reported["scaling"]] == simulated["scaling"]


@pytest.mark.parametrize(
    ("config", "link"),
    [
        (TENSORS, {"kind": "flat", "latency_s": 1.4e-3, "seconds_per_byte": 2.375e-10}),
        (MODEL, {"kind": "ring", "latency_s": 1e-5, "bytes_per_s": 1e9}),
    ],
)
def test_the_link_is_the_section_of_a_config(tmp_path, config, link):
    reported, _ = _figures(tmp_path, config, "--dp-size", "4")

    assert reported["link"] == link


def test_the_small_collectives_of_a_step_count_with_a_model(tmp_path):
    sent, _ = _figures(tmp_path, MODEL, "--dp-size", "4")
    unfenced, _ = _figures(tmp_path, MODEL, "--dp-size", "4", "ddp.fence=false")

    # 4 ranks in a ring: 2 * 3 hops, and 3 / 4 of 48 bytes there and back
    fence_s = 6 * 1e-5 + 2 * 48 * 3 / 4 / 1e9
    assert sent["plans"][0]["step_s"] - unfenced["plans"][0]["step_s"] == pytest.approx(fence_s, rel=1e-6)
