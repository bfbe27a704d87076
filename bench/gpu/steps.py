"""The steps in the order in which they are run: what matters most first, for a call that runs out of time."""

from . import build, environment, exact, prediction, product_times, products, sanitizer, thunderkittens, timing

STEPS = (
    environment.STEP,
    build.STEP,
    exact.STEP,
    products.STEP,
    product_times.STEP,
    timing.STEP,
    timing.PEER_STEP,
    sanitizer.STEP,
    prediction.STEP,
    thunderkittens.STEP,
)
