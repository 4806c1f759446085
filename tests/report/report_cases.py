"""Configs and workloads that the tests of the report share."""

from megabucket.planning import RunConfig
from megabucket.report import collect

HOSTILE = '</script><img src=x onerror="pwned=1">&amp;\'\u2028\u2029<!--\n\t\x00\u202eevil 名前 🪣 @DATA@ @STYLE@ $& ${pwned=1}'

# Output 15.5.2: two large tensors first and 48 small ones after them, 1.2 ms of backward per million elements.
BOOK_MILLIONS = (30.0, 20.0, *(0.9, 0.6, 0.4, 0.3) * 12)


def tensors(*numels, backward_s=1e-3, forward_s=0.5e-3, name="layer.{}.weight"):
    return [
        {"name": name.format(index), "numel": numel, "backward_s": backward_s, "forward_s": forward_s}
        for index, numel in enumerate(numels)
    ]


def book(**sections):
    entries = [
        {"name": f"layer.{index}", "numel": int(millions * 1e6), "backward_s": 1.2e-3 * millions}
        for index, millions in enumerate(BOOK_MILLIONS)
    ]
    link = {"latency_s": 1.4e-3, "seconds_per_byte": 0.95e-9 / 4}
    return RunConfig.model_validate({"link": link, "workload": {"tensors": entries}, **sections})


def small(*numels, name="layer.{}.weight", **sections):
    defaults = {"link": {"kind": "ring", "latency_s": 1e-5, "bytes_per_s": 1e9}}
    return RunConfig.model_validate(
        {**defaults, "workload": {"tensors": tensors(*(numels or (1000, 300, 5000)), name=name)}, **sections}
    )


def zero(**sections):
    return small(
        **{
            "mode": "reduce_scatter",
            "ddp": {"overlap_param_gather": True, "bucket_size": 1000},
            "workload": {"tensors": tensors(1000, 300, 0, 5000, 128), "optimizer_s": 1e-3, "num_microbatches": 2},
            **sections,
        }
    )


def model_run(**sections):
    model = {
        "kind": "gpt",
        "vocab_size": 256,
        "sequence_length": 16,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "dtype": "bfloat16",
    }
    link = {"kind": "ring", "latency_s": 1e-6, "bytes_per_s": 1e9}
    workload = {"tokens_per_microbatch": 64, "flops_per_s": 1e9}
    return RunConfig.model_validate({"mode": "reduce_scatter", "model": model, "link": link, "workload": workload, **sections})


def report(run=None, *, dp_size=4, **arguments):
    return collect(run if run is not None else small(), dp_size=dp_size, **arguments)
