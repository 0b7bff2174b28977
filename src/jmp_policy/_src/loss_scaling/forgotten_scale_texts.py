"""What to say of gradients that were computed without their loss scale, or changed while it was in them."""

CLIPPED = (
    "loss_scaled gets gradients that optax has clipped, normalised or changed otherwise while the loss scale "
    "was in them: they are divided by the scale afterwards, so that a norm of 1 becomes 1/65536. Put "
    "everything that looks at gradients inside: loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), "
    "optimizer), loss_scale)."
)


DIVIDED = (
    "loss_scaled gets gradients that were divided by the loss scale already, and divides them again: the "
    "parameters learn 65,536 times too slowly at a scale of 65,536. Give update the gradients as "
    "scaled_value_and_grad returns them."
)


def without_scale(loss: str) -> str:
    """Of gradients that no loss scale multiplied, as their program shows."""
    return (
        f"loss_scaled divides the gradients{f' of {loss!r}' if loss else ''} by the loss scale in its state, "
        "and they were computed in this function without it: the parameters would learn 65,536 times too "
        f"slowly at a scale of 65,536. {_repair(loss)}"
    )


def not_asked_for(loss: str) -> str:
    """Of gradients whose history is not known, where nobody has asked for a loss scale."""
    return (
        "loss_scaled divides gradients by the loss scale in its state, and nobody has asked for a loss scale "
        "to multiply a loss by: if nothing else did, the parameters learn 65,536 times too slowly at a "
        f"scale of 65,536. {_repair(loss)}"
    )


def _repair(loss: str) -> str:
    state = "jmp_policy.optim.get_loss_scale_state(opt_state)"
    by_hand = f"{state}.loss_scale[{loss!r}].scale(loss)" if loss else f"{state}.loss_scale.scale(loss)"
    argument = f", loss={loss!r}" if loss else ""
    return (
        f"Use `loss, grads = jmp_policy.scaled_value_and_grad(loss_fn{argument})(opt_state, params)` in "
        f"place of jax.value_and_grad; or, to scale by hand, differentiate what {by_hand} returns."
    )
