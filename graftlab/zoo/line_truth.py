"""Which line of source each mistake of the zoo is at, written down before any scoring.

A mistake of the model is a method that replaces one of :class:`~graftlab.zoo.model.Math`; any line of its body is
right, and so is one of the method that it replaces, for what the mistake leaves out. ``LINES`` has the others: a part
of the right line's text, for mistakes that take effect elsewhere, and for programs. Weights that are wrong have no
line.
"""

from __future__ import annotations

import inspect
import types

from graftlab.verdict.lines import DifferingLine
from graftlab.zoo.faults import Specimen
from graftlab.zoo.model import Math
from graftlab.zoo.programs import Program

_SCALED_BACKWARD = ("return gradients[0] * ctx.factor",)
_GATES = ('kept = (gate["f"]', 'cell = tap("cell", kept + gate["i"]', 'hidden = tap("hidden", gate["o"]')
_BUCKETS = (
    "first = (distance > 0) * half",
    "far = distance.abs() if is_both_ways",
    "grown.clamp(max=3 if is_both_ways",
)

LINES: dict[str, tuple[str, ...]] = {
    # A number that the replaced method returns takes effect where it is used.
    "scaled_by_head_dim": ("* self.scale(layer)",),
    "one_layer_unscaled": ("* self.scale(layer)",),
    "activations_gradient": ("return gradients[0] * (x > 0)",),
    "scale_forgotten_backward": _SCALED_BACKWARD,
    "values_gradient_halved": _SCALED_BACKWARD,
    "router_detached_half": _SCALED_BACKWARD,
    "gradient_counted_twice": _SCALED_BACKWARD,
    # A sum over the ranks that is missing: the line that makes the summands, in the backward pass that of its forward.
    "one_sum_forgotten": ("self.reduce(F.linear(mixed",),
    "attentions_gradient_not_summed": ("return F.linear(x, weight, bias)",),
    "mlps_gradient_not_summed": (
        'F.linear(inner, w("gate"))',
        'inner = F.silu(torch.einsum("bsh,emh->bsem", x, gate))',
    ),
    "routers_gradient_not_summed": ('torch.einsum("bseh,bse->bsh", each, shares)',),
    # Programs.
    "ssm_step_size_without_softplus": ('wrong == "softplus"',),
    "ssm_discretised_by_euler": ('wrong == "euler"',),
    "ssm_state_lost_between_chunks": ("0 if reset_every and at % reset_every == 0",),
    "ssm_without_its_skip": ('wrong == "skip"',),
    "convolution_padded_by_reflection": ('mode="reflect" if wrong',),
    "causal_convolution_one_step_late": ("F.pad(x, (4, 0) if wrong",),
    "transposed_convolution_flipped": ("kernel.flip(-1) if wrong",),
    # A module's mode and its settings take effect where it is called.
    "batch_norm_left_in_eval": ("return model(x)",),
    "batch_norm_momentum_turned_around": ("norm.train(is_training)(x)",),
    "batch_norm_with_tensorflows_eps": ('tap("norm", norm(x))',),
    "batch_norm_over_padding": ("seen = x[torch.ones_like(real) if wrong",),
    "group_norm_in_other_groups": ("F.group_norm(torch.unflatten(x, 1, (4, 2))", "torch.unflatten(x, 1, (2, 4))"),
    "lstm_gates_in_the_order_of_cudnn": ("gate = dict(zip(order", *_GATES),
    "lstm_forget_bias_added_twice": ('(gate["f"] + forget)',),
    "lstm_hidden_state_reversed_in_time": ("x.flip(0) if wrong",),
    "cross_attention_over_its_own_states": ("x if wrong else encoded", 'tap("k", source @'),
    "cross_attention_with_a_causal_mask": (".triu(1) if wrong",),
    "cross_attention_to_padding": ("0.0 if wrong else -1e9",),
    "relative_bias_with_one_way_buckets": _BUCKETS,
    "relative_bias_in_the_first_layer_alone": ("scores if wrong and i else scores + bias",),
    "alibi_slopes_of_six_heads": ("return alibi(torch.tensor(slopes)",),
    "alibi_slopes_of_one_rank_for_all_heads": ("slopes[:2].repeat(2) if wrong",),
    "experts_take_one_token_too_many": ("< (4 if wrong else 3)",),
    "experts_drop_the_residual_too": ("x * kept[:, None] if wrong",),
    "experts_normalise_before_they_drop": ("whole = top if wrong", "kept / whole.sum("),
    "tied_head_keeps_the_weight_of_before": ("embed.weight.clone()", "embed.weight.add_("),
    "tied_embedding_scaled_twice": ("(math.sqrt(8) if wrong else 1.0)",),
    "int8_scale_of_the_whole_tensor": ("weight.abs().amax() if dim is None",),
    "int8_zero_point_ignored": ("(0 if wrong else zero)",),
    "autocast_with_another_activation": ("up * up.sigmoid() if wrong",),
    "dataclass_with_logarithms_of_its_weights": ("weights = weights.log()",),
    "tuple_of_attention_with_another_scale": ('scores * 1.1 if self.wrong == "scale"',),
    "float8_scales_read_by_columns": ("self.weight_scale_inv.T if",),
    "int8_activations_clipped": ("largest.mean() if",),
    "packed_numbers_in_the_other_order": ("torch.stack([high, low]",),
    "packed_zero_point_off_by_one": ("(1 if self.wrong ==",),
    "residual_overwritten_after_its_tap": ("x.sub_(x.mean(-1, keepdim=True)) if wrong",),
    "statistics_carried_from_call_to_call": ("carried = x.mean(0)",),
    "dropout_left_on": ("F.dropout(x, 0.2, training=wrong)",),
    "last_key_lost_in_whole_blocks": ("seen[:, -1] = False",),
    "window_over_long_requests": ("seen &= ",),
    "cache_of_an_earlier_request": ("torch.cat([cache[slot][:3], v[3:]])",),
    "adapter_on_one_request": ('wrong == "rows"',),
}


def has_line(specimen: Specimen | Program) -> bool:
    """Whether a mistake is at a line of source."""
    return specimen.name in LINES or (isinstance(specimen, Specimen) and specimen.math is not Math)


def is_right(specimen: Specimen | Program, line: DifferingLine) -> bool:
    """Whether a reported line is the mistake's."""
    if any(part in line.source for part in LINES.get(specimen.name, ())):
        return True
    if not isinstance(specimen, Specimen) or specimen.name in LINES:
        return False
    replaced = {name: method for name, method in vars(specimen.math).items() if isinstance(method, types.FunctionType)}
    return any(_is_in(line, each) for name, each in replaced.items()) or any(
        _is_in(line, getattr(Math, name)) for name in replaced
    )


def _is_in(line: DifferingLine, function: types.FunctionType) -> bool:
    source, first = inspect.getsourcelines(function)
    return line.file == function.__code__.co_filename and first < line.line < first + len(source)
