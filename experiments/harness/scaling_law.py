"""Additive scaling laws, `L = sum_i c_i / x_i ** a_i + L0`, fitted in log space to convergence."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.optimize import least_squares
from scipy.special import logsumexp, softmax

Rows = Float[np.ndarray, "N F"]


@dataclasses.dataclass(frozen=True)
class Law:
    """A fitted law: exponents and log coefficients by term, the irreducible loss, and how well the law fits."""

    exponents: tuple[float, ...]
    log_coefficients: tuple[float, ...]
    irreducible: float
    risk: float  # 100 times the mean squared error of log L
    gradient: float  # largest component of the risk's gradient relative to the residuals: 0 at an optimum

    @property
    def parameters(self) -> np.ndarray:
        return np.array([*self.log_coefficients, *self.exponents, np.log(self.irreducible)])

    def terms(self, x: Float[np.ndarray, " F"]) -> Float[np.ndarray, " F"]:
        """The contribution of each term to the loss at a point."""
        return np.exp(np.array(self.log_coefficients) - np.array(self.exponents) * np.log(x))


def fit(x: Rows, loss: Float[np.ndarray, " N"], start: np.ndarray | None = None, fixed: dict | None = None) -> Law:
    """The law that minimises the mean of (log L - log L_fit)^2; the best of several starts unless one is given.

    fixed: exponents, by index of their term, that are held at a value.
    """
    x, target = np.log(np.asarray(x, float)), np.log(np.asarray(loss, float))
    terms, fixed = x.shape[1], fixed or {}
    middle = np.mean(x, axis=0)  # at the middle of the data, coefficients and exponents are almost uncorrelated
    free = [i for i in range(2 * terms + 1) if i - terms not in fixed]
    whole = np.zeros(2 * terms + 1)
    for term, value in fixed.items():
        whole[terms + term] = value

    def unpack(own):
        whole[free] = own
        return whole[:terms], whole[terms : 2 * terms], whole[-1]

    def logs(own):
        coefficients, exponents, floor = unpack(own)
        powers = coefficients - exponents * (x - middle)
        return np.concatenate([powers, np.full((len(x), 1), floor)], axis=1)

    def residuals(own):
        return logsumexp(logs(own), axis=1) - target

    def jacobian(own):
        share = softmax(logs(own), axis=1)
        slopes = -share[:, :terms] * (x - middle)
        return np.concatenate([share[:, :terms], slopes, share[:, terms:]], axis=1)[:, free]

    if start is None:
        level = float(np.min(target))
        starts = [[level - 2.0] * terms + [a] * terms + [level - d] for a in (0.3, 1.0) for d in (0.05, 0.3)]
    else:
        start = np.array(start, float)
        start[:terms] -= start[terms : 2 * terms] * middle
        starts = [start]
    options = {"method": "lm", "x_scale": "jac", "xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12, "max_nfev": 5000}
    found = [least_squares(residuals, np.asarray(s)[free], jacobian, **options) for s in starts]
    best = min(found, key=lambda one: one.cost)
    coefficients, exponents, floor = (np.copy(part) for part in unpack(best.x))
    gradient = np.max(np.abs(best.grad)) / max(2 * best.cost, 1e-30)
    risk = 100 * 2 * best.cost / len(target)
    law = tuple(exponents.tolist()), tuple((coefficients + exponents * middle).tolist())
    return Law(*law, float(np.exp(floor)), float(risk), float(gradient))


def drop_highest(loss: Float[np.ndarray, " N"], count: int) -> np.ndarray:
    """A mask of the points that remain without the `count` highest losses, and without any as high as the last of
    these."""
    return loss < np.sort(loss)[-count] if count else np.full(loss.shape, True)


def bootstrap_parameters(x: Rows, loss: Float[np.ndarray, " N"], law: Law, samples: int, seed: int = 0) -> np.ndarray:
    """The parameters [samples, 2F + 1] of fits to resampled points, started from the fit to all points."""
    noise, draws = np.random.default_rng(seed), []
    for _ in range(samples):
        rows = noise.integers(0, len(loss), len(loss))
        draws.append(fit(x[rows], loss[rows], law.parameters).parameters)
    return np.array(draws)


def profile(x: Rows, loss: Float[np.ndarray, " N"], term: int, values: Sequence[float]) -> list[float]:
    """The lowest risk with one exponent held at each of the values."""
    return [fit(x, loss, fixed={term: value}).risk for value in values]
