"""Identity of a live model: any change of the numbers makes another space, a name alone never."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from tierkv.errors import AttachError
from tierkv_adapters.hf import weights
from tierkv_adapters.hf.fingerprint import ModelIdentity
from tierkv_adapters.hf.probe import check_supported, layout_of, probe_layers


class LoraLinear(torch.nn.Module):
    """A linear layer that follows PEFT's ``BaseTunerLayer`` conventions."""

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r", "scaling")

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict()
        self.lora_B = torch.nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.r: dict[str, int] = {}
        self.active_adapters: list[str] = []
        self.disable_adapters = False
        self.merged = False

    def add(self, name: str, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        down = torch.nn.Linear(self.base_layer.in_features, 2, bias=False)
        up = torch.nn.Linear(2, self.base_layer.out_features, bias=False)
        with torch.no_grad():
            for layer in (down, up):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        self.lora_A[name], self.lora_B[name] = down, up
        self.scaling[name], self.r[name] = scale, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        if not self.disable_adapters and not self.merged:
            for name in self.active_adapters:
                out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out


def with_lora(model: Any) -> list[Any]:
    wrapped: list[Any] = []
    for layer in model.model.layers:
        layer.self_attn.k_proj = LoraLinear(layer.self_attn.k_proj)
        wrapped.append(layer.self_attn.k_proj)
    model.eval()
    return wrapped  # typed loosely: torch types the members of a module as tensor or module


def test_equal_models_are_equal_whatever_they_are_called(kit: Any) -> None:
    one, two = kit.make("llama"), kit.make("llama")
    two.config._name_or_path = "/somewhere/else"
    two.name_or_path = "another-name"
    assert ModelIdentity(one)() == ModelIdentity(two)()


def test_each_difference_differs(kit: Any) -> None:
    base = ModelIdentity(kit.make("llama"))()
    other_seed = kit.make("llama", seed=1)
    assert ModelIdentity(other_seed)() != base
    assert ModelIdentity(kit.make("llama").to(torch.bfloat16))() != base
    rope = kit.make("llama")
    if hasattr(rope.config, "rope_parameters"):
        rope.config.rope_parameters = dict(rope.config.rope_parameters) | {"rope_theta": 123.0}
    else:
        rope.config.rope_theta = 123.0
    assert ModelIdentity(rope)() != base
    eager = kit.make("llama")
    eager.set_attn_implementation("eager")
    assert ModelIdentity(eager)() != base
    epsilon = kit.make("llama")
    epsilon.config.rms_norm_eps = 1e-4
    assert ModelIdentity(epsilon)() != base


def test_digest_is_kept_until_something_changes(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.make("llama")
    identity = ModelIdentity(model)
    first = identity()
    reads: list[int] = []
    plain = weights.tensor_digest

    def counted(tensor: torch.Tensor) -> bytes:
        reads.append(1)
        return plain(tensor)

    monkeypatch.setattr(weights, "tensor_digest", counted)
    assert identity() == first
    assert reads == []
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] += 1
    changed = identity()
    assert changed.weights != first.weights
    assert len(reads) == len(model.state_dict()) + len(list(model.buffers()))
    with torch.no_grad():
        weight[0, 0] -= 1
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.detach().clone())
    assert identity().weights == ModelIdentity(model)().weights
    reads.clear()
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data + 1  # replaced behind the parameter
    assert identity().weights != changed.weights
    weight.data.add_(1)  # invisible, as documented
    before = identity()
    assert before == identity()
    identity.refresh()
    assert identity() != before


def test_models_loaded_in_inference_mode(kit: Any) -> None:
    with torch.inference_mode():
        model = kit.make("llama")
    assert ModelIdentity(model)() == ModelIdentity(kit.make("llama"))()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_tensors_of_any_dtype_and_strides_are_digested(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).reshape(4, 6) % 2).to(torch.float32).to(dtype)
    digest = weights.tensor_digest
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    changed = tensor.clone()
    changed.view(torch.uint8)[0, 0] ^= 1
    assert digest(changed) != digest(tensor)
    assert digest(tensor[:0]) == b""
    assert len(digest(tensor[0, 0])) == 16


# ----------------------------------------------------------------- adapters


def test_f005_active_adapters_are_part_of_the_identity(kit: Any) -> None:
    model = kit.make("llama")
    base = ModelIdentity(model)()
    layers = with_lora(model)
    identity = ModelIdentity(model)
    assert identity() == base  # wrapped, nothing active: the same numbers, the same space
    for number, layer in enumerate(layers):
        layer.add("a", seed=number)
        layer.add("b", seed=100 + number)
    assert identity() == base
    seen = [base]
    for active in (["a"], ["b"], ["a", "b"]):
        for layer in layers:
            layer.active_adapters = active
        now = identity()
        assert now not in seen
        assert now.weights == base.weights
        assert [adapter.name for adapter in now.adapters] == active
        seen.append(now)
    for layer in layers:
        layer.disable_adapters = True
    assert identity() == base


def test_f006_reloaded_or_rescaled_adapter_differs(kit: Any) -> None:
    model = kit.make("llama")
    layers = with_lora(model)
    for number, layer in enumerate(layers):
        layer.add("a", seed=number)
        layer.active_adapters = ["a"]
    identity = ModelIdentity(model)
    first = identity()
    with torch.no_grad():
        layers[1].lora_B["a"].weight.add_(0.5)  # new weights under the old name
    second = identity()
    assert second.adapters[0].name == "a"
    assert second.adapters[0].version != first.adapters[0].version
    for layer in layers:
        layer.scaling["a"] = 2.0
    third = identity()
    assert third.adapters[0].scale == 2.0
    assert third != second
    layers[0].scaling["a"] = 3.0  # differs per layer
    assert identity() not in (first, second, third)
    del layers[2].lora_A["a"], layers[2].lora_B["a"], layers[2].scaling["a"]
    layers[2].active_adapters = []
    assert identity() not in (first, second, third)


@torch.no_grad()
def merge(layers: list[Any], sign: int = 1) -> None:
    """As PEFT does: through ``.data``, which leaves no trace on the parameter."""
    for layer in layers:
        delta = layer.lora_B["a"].weight @ layer.lora_A["a"].weight * layer.scaling["a"]
        layer.base_layer.weight.data += sign * delta
        layer.merged = sign > 0


def test_a_merged_adapter_is_part_of_the_weights(kit: Any) -> None:
    model = kit.make("llama")
    layers = with_lora(model)
    for number, layer in enumerate(layers):
        layer.add("a", seed=number)
    identity = ModelIdentity(model)
    base = identity()
    for layer in layers:
        layer.active_adapters = ["a"]
    active = identity()
    merge(layers)
    merged = identity()
    assert merged.adapters == ()
    assert merged.weights not in (active.weights, base.weights)
    merge(layers, -1)  # out, changed, and in again between two calls
    for layer in layers:
        layer.scaling["a"] = 3.0
    merge(layers)
    again = identity()
    assert again.weights not in (merged.weights, base.weights)
    assert again == ModelIdentity(model)()
    layers[0].disable_adapters = True  # PEFT's next forward pass would unmerge it
    with pytest.raises(AttachError, match="unmerge"):
        identity()


def test_adapters_without_a_scale_are_part_of_the_identity(kit: Any) -> None:
    model = kit.make("llama")
    layers = with_lora(model)
    for number, layer in enumerate(layers):
        layer.add("a", seed=number)
        layer.active_adapters = ["a"]
        layer.scaling.clear()  # as IA3, OFT, LN tuning, modules to save: they have none
        layer.other_param_names = ("r", "strength")
        layer.strength = {"a": 1}
    identity = ModelIdentity(model)
    first = identity()
    assert [adapter.name for adapter in first.adapters] == ["a"]
    with torch.no_grad():
        layers[0].lora_B["a"].weight.add_(1)
    second = identity()
    layers[0].strength["a"] = 2  # a setting under any name
    third = identity()
    model.peft_config = {"a": type("Config", (), {"to_dict": lambda _: {"seed": 1}})()}
    assert len({first, second, third, identity()}) == 4


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_frequencies_and_packed_weights_are_read(kit: Any) -> None:
    model = kit.make("llama")
    identity = ModelIdentity(model)
    first = identity()
    model.model.rotary_emb.inv_freq.mul_(1.5)  # a buffer that is saved nowhere
    second = identity()
    assert second.weights != first.weights

    class Packed(torch.nn.Module):
        """As dynamically quantised layers: their weights are no tensors of the state."""

        def __init__(self, value: object) -> None:
            super().__init__()
            self.value = value

        def get_extra_state(self) -> object:
            return self.value

        def set_extra_state(self, state: object) -> None:
            self.value = state

    seen = {second}
    ramp = torch.arange(4.0)
    for weight, scale in ((ramp, 1.0), (ramp + 1, 1.0), (ramp, 2.0)):
        model.model.extra = Packed(({"weight": weight}, scale, torch.float32))
        seen.add(identity())
    assert len(seen) == 4
    model.model.extra = Packed(torch.quantize_per_tensor(ramp, 1.0, 0, torch.qint8))
    with pytest.raises(AttachError, match="quantised"):
        identity()
    model.model.extra = Packed(object())
    with pytest.raises(AttachError, match="told apart"):
        identity()
    model.model.extra = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(AttachError, match="not in memory"):
        identity()


def test_the_code_of_a_model_is_part_of_its_identity(kit: Any) -> None:
    model = kit.make("llama")
    identity = ModelIdentity(model)()
    remote = type("LlamaForCausalLM", (type(model),), {"__module__": "transformers_modules.x.rev2"})
    model.__class__ = remote
    assert ModelIdentity(model)() != identity


def _twice(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class _Steering:
    strength = 2

    def twice(self, module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * self.strength


def test_hooks_and_replaced_methods_are_part_of_the_identity(kit: Any) -> None:
    """Steering by hooks changes the KV and no weight."""
    model = kit.make("llama")
    identity = ModelIdentity(model)
    plain = identity()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out * 2)
    steered = identity()
    assert steered != plain
    assert identity() == steered  # as long as it is this very object
    assert ModelIdentity(model)() != steered  # what a closure holds, nobody can see
    hook.remove()
    assert identity() == plain
    hook = model.model.layers[0].mlp.register_forward_hook(_twice)
    named = identity()
    assert named not in (plain, steered)
    assert ModelIdentity(model)() == named  # a function's name holds in every process
    hook.remove()
    hook = model.model.layers[0].mlp.register_forward_hook(_Steering().twice)
    steered = identity()
    assert ModelIdentity(model)() != steered  # the object may be set to anything
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert identity() != plain
    hook.remove()
    layer = model.model.layers[1].mlp
    forward = layer.forward
    layer.forward = functools.wraps(forward)(lambda x: forward(x) * 2)
    assert identity() not in (plain, steered, named)
    layer.forward = functools.partial(forward)  # the same, in other clothes
    assert identity() == plain
    del layer.forward
    assert identity() == plain


def test_a_wrapped_model_is_unwrapped(kit: Any) -> None:
    class Wrapper(torch.nn.Module):
        """As a PeftModel: another class around the model."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.base_model = model

        def get_base_model(self) -> Any:
            return self.base_model

    model = kit.make("llama")
    assert ModelIdentity(Wrapper(model))() == ModelIdentity(model)()
    assert probe_layers(Wrapper(model)) == probe_layers(model)


# ----------------------------------------------------------------- what is refused


def test_unsupported_models_are_refused_with_a_reason(kit: Any) -> None:
    import transformers as library

    transformers: Any = library
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=48)
    ).eval()
    with pytest.raises(AttachError, match="encoder-decoder"):
        check_supported(t5)
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
    ).eval()
    with pytest.raises(AttachError, match="MambaForCausalLM"):
        check_supported(mamba)
    with pytest.raises(AttachError, match="not a Transformers model"):
        check_supported(torch.nn.Linear(2, 2))
    half = kit.make("llama")
    half.model.layers[1].mlp.train()
    with pytest.raises(AttachError, match="training mode"):
        check_supported(half)
    prompts = kit.make("llama")
    prompts.peft_config = {"p": type("Config", (), {"is_prompt_learning": True})()}
    with pytest.raises(AttachError, match="virtual tokens"):
        check_supported(prompts)
    rope = kit.make("llama")
    for name in ("rope_parameters", "rope_scaling"):
        if getattr(rope.config, name, None) is not None or name == "rope_scaling":
            setattr(rope.config, name, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
            break
    with pytest.raises(AttachError, match="dynamic"):
        check_supported(rope)


def test_layout_follows_the_live_tensors(kit: Any) -> None:
    model = kit.make("gemma3")
    layout = layout_of(probe_layers(model))
    twin = layout_of(probe_layers(copy.deepcopy(model).to(torch.bfloat16)))
    assert layout.fingerprint != twin.fingerprint
    assert layout.raw_bytes(1) == 6 * 2 * 24 * 4
