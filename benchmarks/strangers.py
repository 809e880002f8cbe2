"""Models of other packages: what replace does to each. docs/results.py judges single norms.

    pip install torch transformers diffusers x-transformers timm vit-pytorch denoising-diffusion-pytorch
    python benchmarks/strangers.py > benchmarks/strangers.md

The models are small and have random weights.
"""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rmsnorm.conversion import replace

CAUSAL = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Phi3", "Olmo2", "Glm4",
          "Granite", "Mamba", "MiniMax", "Cohere2")  # fmt: skip
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # fmt: skip


def noise(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def models() -> Iterator[tuple[str, str, Any, Callable[[Any], Any]]]:
    """Package, name, model, and a call of it."""
    transformers = importlib.import_module("transformers")
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    for name in CAUSAL:
        config = getattr(transformers, f"{name}Config")(**SIZES)
        model = transformers.AutoModelForCausalLM.from_config(config)
        yield "transformers", name, model, lambda model: model(input_ids=ids).logits
    x = importlib.import_module("x_transformers")
    options: dict[str, Any]
    for options in ({"use_rmsnorm": True}, {"use_simple_rmsnorm": True}, {"use_scalenorm": True},
                    {"use_rmsnorm": True, "attn_qk_norm": True, "attn_qk_norm_dim_scale": True}):  # fmt: skip
        layers = x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        model = x.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)
        yield "x-transformers", ", ".join(options), model, lambda model: model(ids)
    yield from images()
    diffusers = importlib.import_module("diffusers")
    yield "diffusers", "SD3", diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        caption_projection_dim=16, joint_attention_dim=16, pooled_projection_dim=16, out_channels=4, qk_norm="rms_norm",
    ), lambda model: model(
        hidden_states=noise(1, 4, 8, 8), encoder_hidden_states=noise(1, 5, 16), pooled_projections=noise(1, 16),
        timestep=torch.tensor([3]),
    ).sample  # fmt: skip
    yield "diffusers", "Flux", diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ), lambda model: model(
        hidden_states=noise(1, 16, 4), encoder_hidden_states=noise(1, 5, 32), pooled_projections=noise(1, 32),
        timestep=torch.tensor([3.0]), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(5, 3),
    ).sample  # fmt: skip
    yield "diffusers", "Wan transformer", diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ), lambda model: model(
        hidden_states=noise(1, 16, 2, 8, 8), timestep=torch.tensor([3]), encoder_hidden_states=noise(1, 5, 16)
    ).sample  # fmt: skip
    yield (
        "diffusers",
        "Wan VAE",
        diffusers.AutoencoderKLWan(
            base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        lambda model: model(noise(1, 3, 5, 16, 16)).sample,
    )


def images() -> Iterator[tuple[str, str, Any, Callable[[Any], Any]]]:
    """Models that take images."""
    timm, norm = importlib.import_module("timm.models"), importlib.import_module("timm.layers")
    image = noise(2, 3, 32, 32)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    vit = timm.vision_transformer.VisionTransformer
    yield "timm", "ViT, RmsNorm, qk_norm", vit(**sizes, norm_layer=norm.RmsNorm, qk_norm=True), lambda m: m(image)
    yield "timm", "ViT, SimpleNorm", vit(**sizes, norm_layer=norm.SimpleNorm), lambda m: m(image)
    yield "timm", "EVA, RmsNorm", timm.eva.Eva(**sizes, norm_layer=norm.RmsNorm), lambda m: m(image)
    convnext = timm.convnext.ConvNeXt(
        depths=(1, 1, 1, 1), dims=(8, 16, 16, 16), num_classes=5, norm_layer=norm.RmsNorm2d, conv_mlp=True
    )
    yield "timm", "ConvNeXt, RmsNorm2d", convnext, lambda m: m(image)
    simple = importlib.import_module("vit_pytorch.simple_vit_with_qk_norm").SimpleViT(
        image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=32, dim_head=16
    )
    yield "vit-pytorch", "SimpleViT, qk_norm", simple, lambda m: m(image)
    unet = importlib.import_module("denoising_diffusion_pytorch").Unet(dim=8, dim_mults=(1, 2))
    yield "denoising-diffusion-pytorch", "Unet", unet, lambda m: m(image, torch.tensor([1, 2]))


def difference(a: Any, b: Any) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


def trial(model: Any, call: Callable[[Any], Any]) -> tuple[str, float, float, bool]:
    """What was replaced and left; the differences of outputs and of gradients; whether the state survives."""
    mine = copy.deepcopy(model)
    report = [entry for entry in replace(mine) if entry.name or entry.variant]
    count = sum(entry.variant is not None for entry in report)
    left = sorted({f"{entry.kind}: {entry.why}" for entry in report if entry.variant is None})
    with torch.no_grad():
        y = difference(call(model.eval()), call(mine.eval()))
    gradients = []
    for each in (model, mine):
        torch.manual_seed(0)
        output = call(each.train())
        (output * noise(*output.shape)).mean().backward()
        gradients.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    theirs, ours = gradients
    same = list(model.state_dict()) == list(mine.state_dict()) and theirs.keys() == ours.keys()
    model.load_state_dict(mine.state_dict())
    mine.load_state_dict(model.state_dict())
    if saved(model) is not None:  # else the package's own model cannot be pickled
        again = saved(mine)
        with torch.no_grad():
            same &= again is not None and torch.equal(call(again.eval()), call(mine.eval()))
    listed = f"{count} replaced" + (f"; left: {'; '.join(left)}" if left else "")
    return listed, y, max(difference(theirs[name], ours[name]) for name in theirs), same


def saved(model: Any) -> Any:
    """The model, saved and loaded; None where it cannot be."""
    memory = io.BytesIO()
    try:
        torch.save(model, memory)
    except (AttributeError, TypeError, pickle.PicklingError):
        return None
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def main() -> None:
    warnings.simplefilter("ignore")
    print(
        "# Models of other packages\n\nWritten by `python benchmarks/strangers.py`: what `replace` does to each. "
        "[Their norms](../docs/results.md) are judged by `make strangers`.\n\n"
        "The differences are the largest ones of an output and of a gradient, as shares of the largest element of\n"
        "each: of a model in evaluation, and of a step in training. `state` says whether both state dicts have the "
        "same keys and load\ninto each other, and whether the whole model is saved and loaded.\n"
    )
    print("| package | model | norms | output | gradient | state |\n|---|---|---|---|---|---|")
    torch.manual_seed(0)
    for package, name, model, call in models():
        listed, y, gradient, same = trial(model, call)
        print(f"| {package} | {name} | {listed} | {y:.0e} | {gradient:.0e} | {'yes' if same else 'no'} |", flush=True)


if __name__ == "__main__":
    main()
