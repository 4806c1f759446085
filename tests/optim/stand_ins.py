"""Optimizers of other packages as torch sees them, computed on the CPU: their defaults, and where they keep which number."""

import itertools

import torch


class FusedAdam(torch.optim.Optimizer):
    """apex's: counts in its groups, and skips those without parameters."""

    def __init__(
        self,
        params,
        lr=1e-3,
        *,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        assert not amsgrad
        lr = torch.tensor(lr) if capturable else lr
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none
        self.capturable, self.master_weights = capturable, master_weights
        self.multi_tensor_adam = torch.empty  # a function in C, as amp_C's is
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        if capturable:
            self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            if "step" in group:
                group["step"] += 1 if not self.capturable else (self._dummy_overflow_buf != 1).to(torch.int32)
            else:
                group["step"] = 1 if not self.capturable else torch.ones(1, dtype=torch.int32)
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def update(self, param, group):
        state, grad, (beta1, beta2) = self.state[param], param.grad, group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * param
        first = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        count = int(group["step"])
        of_first, of_second = (1 - beta1**count, 1 - beta2**count) if group["bias_correction"] else (1.0, 1.0)
        update = (first / of_first) / ((second / of_second).sqrt() + group["eps"])
        if self.adam_w_mode:
            update += group["weight_decay"] * param
        param.sub_(float(group["lr"]) * update)


class TransformerEngineFusedAdam(FusedAdam):
    """Saves and loads state that it may keep in other dtypes, tensor by tensor."""

    def _params_by_index(self, state_dict):
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return dict(zip(saved, own, strict=True))

    def state_dict(self):
        saved = super().state_dict()
        for index, param in self._params_by_index(saved).items():
            if index in saved["state"]:
                saved["state"][index] = {name: self.state[param][name].float() for name in saved["state"][index]}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for index, param in self._params_by_index(state_dict).items():
            values = state_dict["state"].get(index, {})
            self.state[param] = {name: torch.zeros_like(param, dtype=torch.float32) for name in values}
            for name, value in values.items():
                assert value.dtype == torch.float32
                self.state[param][name].copy_(value)


class FusedSGD(torch.optim.Optimizer):
    """apex's: a group whose last parameter has no momentum yet is in its first run."""

    def __init__(
        self,
        params,
        lr,
        *,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        wd_after_momentum=False,
        materialize_master_grads=True,
        set_grad_none=False,
    ):
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)
        self.wd_after_momentum, self.materialize_master_grads = wd_after_momentum, materialize_master_grads
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            first_run = True
            for param in params:
                first_run = "momentum_buffer" not in self.state[param]
                self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            for param in params:
                grad = param.grad / self.most_recent_scale
                if not self.wd_after_momentum:
                    grad = grad + group["weight_decay"] * param
                if group["momentum"]:
                    buffer = self.state[param]["momentum_buffer"]
                    if first_run:
                        buffer.copy_(grad)
                    else:
                        buffer.mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
                    grad = grad + group["momentum"] * buffer if group["nesterov"] else buffer
                if self.wd_after_momentum:
                    grad = grad + group["weight_decay"] * param
                param.sub_(group["lr"] * grad)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False


class ScheduleFree(torch.optim.Optimizer):
    """SGD of the package schedulefree: ``eval`` and ``train`` exchange the weights, and groups say which they are."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "k": 0,
            "weight_sum": 0.0,
            "train_mode": False,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def eval(self):
        self._exchange(is_training=False)

    @torch.no_grad()
    def train(self):
        self._exchange(is_training=True)

    def _exchange(self, *, is_training):
        for group in self.param_groups:
            weight = 1 - group["momentum"] if is_training else 1 - 1 / group["momentum"]
            for param in group["params"] if group["train_mode"] != is_training else ():
                if "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight)
            group["train_mode"] = is_training

    @torch.no_grad()
    def step(self, closure=None):
        assert self.param_groups[0]["train_mode"], "not in train mode"
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.clone())
                    grad = param.grad + group["weight_decay"] * param
                    param.lerp_(z, share).add_(grad, alpha=lr * (momentum * (1 - share) - 1))
                    z.sub_(grad, alpha=lr)
            group["k"] += 1
