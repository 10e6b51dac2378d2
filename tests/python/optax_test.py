#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.optax: its updates are those of precondor.Client for the same gradients, and Adam's for vectors."""

import copy
import functools
import os
import pickle
import tempfile
import unittest
from unittest import mock

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # read when JAX starts

import jax
import jax.numpy as jnp
import numpy as np
import optax

import precondor
import precondor.optax
from interop_test import Server
import test_program

STEPS = 12
# As flax names them: a kernel is [in, out], of a convolution [h, w, in, out].
SHAPES = {"conv": {"kernel": (3, 3, 2, 4), "bias": (4,)}, "dense": {"kernel": (6, 5), "bias": (5,)}, "scale": (), "row": (1, 7)}


def tree(fill):
    return jax.tree_util.tree_map(fill, SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))


def gradients(step):
    random = np.random.default_rng(step)
    return tree(lambda shape: jnp.asarray(random.standard_normal(shape), jnp.float32))


class OptaxTest(unittest.TestCase):
    program = server = None

    def setUp(self):
        self.name = self.id().rsplit(".", 1)[-1][:100]

    def transformation(self, **options):
        made = precondor.optax.scale_by_precondor(options.pop("address", self.server.address), **options)
        self.addCleanup(made.close, end_session=True)
        return made

    def run_steps(self, transformation, state=None, first=0, steps=STEPS):
        state = transformation.init(gradients(0)) if state is None else state
        update = jax.jit(transformation.update)
        found = []
        for step in range(first, first + steps):
            updates, state = update(gradients(step), state)
            found.append(jax.device_get(updates))
        return found, state

    def expect_equal(self, found, expected):
        jax.tree_util.tree_map(np.testing.assert_array_equal, found, expected)

    def test_updates_are_the_clients_and_adams(self):
        found, state = self.run_steps(self.transformation(layer_methods={"dense.*": "muon"}))
        self.assertEqual(int(state.step), STEPS)
        layers = [precondor.Layer("a", 3, 24, shape=(3, 3, 2, 4)), precondor.Layer("b", 6, 5)]
        spec = precondor.SessionSpec(self.name, layers, precondor.Method("soap", {"max_factor_dim": 2048}),
                                     layer_methods=[precondor.LayerMethod(precondor.Method("muon"), [1])])
        adam = optax.scale_by_adam(0.95, 0.95)
        vectors = [lambda g: g["conv"]["bias"], lambda g: g["dense"]["bias"], lambda g: g["scale"], lambda g: g["row"]]
        moments = adam.init([of(gradients(0)) for of in vectors])
        with precondor.Client(self.server.address) as client, client.open_session(spec).join() as worker:
            for step, updates in enumerate(found):
                given = gradients(step)
                for layer, (name, shape) in enumerate((("conv", (3, 24)), ("dense", (6, 5)))):
                    answer = worker.precondition(step, layer, np.asarray(given[name]["kernel"]).reshape(shape), 1).result()
                    np.testing.assert_array_equal(updates[name]["kernel"].reshape(shape), answer.gradient)
                worker.report_step(step, 0.0, 1, 0.0)
                expected, moments = adam.update([of(given) for of in vectors], moments)
                for of, one in zip(vectors, expected):
                    np.testing.assert_allclose(of(updates), one, rtol=1e-6, atol=1e-6)

    def test_learns_with_a_server_of_its_own(self):
        transformation = self.transformation(address="local")
        optimizer = optax.chain(transformation, optax.add_decayed_weights(0.01), optax.scale_by_learning_rate(0.02))
        random = np.random.default_rng(1)
        x = random.standard_normal((64, 6)).astype(np.float32)
        y = np.tanh(x @ random.standard_normal((6, 3)).astype(np.float32))
        params = [jnp.asarray(random.standard_normal(shape) * 0.3, jnp.float32) for shape in ((6, 16), (16,), (16, 3), (3,))]

        def loss_of(params):
            return jnp.mean((jnp.tanh(x @ params[0] + params[1]) @ params[2] + params[3] - y)**2)

        @jax.jit
        def step(params, state):
            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, state = optimizer.update(grads, state, params, value=loss)
            return optax.apply_updates(params, updates), state, loss

        state, losses = optimizer.init(params), []
        for _ in range(80):
            params, state, loss = step(params, state)
            losses.append(float(loss))
        self.assertLess(losses[-1], 0.1 * losses[0])

    def test_a_step_that_is_not_finite_changes_nothing(self):
        transformation = self.transformation()
        _, state = self.run_steps(transformation, steps=3)
        for name in ("kernel", "bias"):
            bad = gradients(3)
            bad["dense"][name] = bad["dense"][name].at[0].set(jnp.nan)
            before = state
            updates, state = jax.jit(transformation.update)(bad, state)
            self.assertTrue(all(not leaf.any() for leaf in jax.tree_util.tree_leaves(updates)))
            self.expect_equal(state.vectors, before.vectors)
            self.assertEqual(int(state.step), int(before.step) + 1)
        found, _ = self.run_steps(transformation, state, first=3, steps=1)
        expected, _ = self.run_steps(self.transformation(), steps=4)
        self.expect_equal(found[0], expected[3])

    def test_bfloat16_stays(self):
        transformation = self.transformation()
        grads = [jnp.ones((4, 3), jnp.bfloat16), jnp.ones(3, jnp.bfloat16)]
        updates, _ = transformation.update(grads, transformation.init(grads))
        self.assertEqual([leaf.dtype for leaf in updates], [jnp.bfloat16] * 2)

    def test_scan_and_sharded_arrays(self):
        expected, _ = self.run_steps(self.transformation())
        scanned = self.transformation()
        every = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *(gradients(step) for step in range(STEPS)))

        def body(state, grads):
            updates, state = scanned.update(grads, state)
            return state, updates

        _, found = jax.jit(lambda every: jax.lax.scan(body, scanned.init(gradients(0)), every))(every)
        for step, one in enumerate(expected):
            self.expect_equal(found["conv"]["kernel"][step], one["conv"]["kernel"])
            # Compilers of JAX round Adam's otherwise inside a loop.
            jax.tree_util.tree_map(lambda leaf, other: np.testing.assert_allclose(leaf[step], other, rtol=1e-6), found, one)

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
        sharded = self.transformation()
        state, update = sharded.init(gradients(0)), jax.jit(sharded.update)
        for step in range(3):
            grads = gradients(step)
            grads["conv"]["kernel"] = jax.device_put(
                grads["conv"]["kernel"], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "model")))
            rest = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            grads, state = (jax.tree_util.tree_map(lambda leaf: leaf if len(leaf.devices()) > 1 else jax.device_put(leaf, rest), one)
                            for one in (grads, state))
            updates, state = update(grads, state)
            self.expect_equal(jax.device_get(updates), expected[step])

    def test_each_device_of_a_mesh_is_a_rank(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
        three = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("all",))

        def placed(tree, mesh, spec):
            def place(leaf):
                fits = len(spec) <= leaf.ndim and all(leaf.shape[at] % 2 == 0 for at, axis in enumerate(spec) if axis)
                return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec if fits else jax.sharding.PartitionSpec()))

            return jax.tree_util.tree_map(place, tree)

        for method in ("soap", "kron", "muon"):
            with self.subTest(method=method):
                expected, _ = self.run_steps(self.transformation(method=method))
                whole = jax.sharding.PartitionSpec()
                sharded = self.transformation(method=method, mesh=mesh)
                state, update = placed(sharded.init(gradients(0)), mesh, whole), jax.jit(sharded.update)
                for step in range(4):
                    spec = (jax.sharding.PartitionSpec("model", None), jax.sharding.PartitionSpec(None, "data"))[step % 2]
                    updates, state = update(placed(gradients(step), mesh, spec), state)
                    self.expect_equal(jax.device_get(updates), expected[step])
                self.assertEqual((sharded.spec.world_size, sharded.spec.exchange), (4, "SHARDED"))
                factors, state = sharded.read_factors(), jax.device_get(state)
                # On another number of devices, and on one.
                other = self.transformation(method=method, mesh=three, factors=factors)
                updates, _ = jax.jit(other.update)(placed(gradients(4), three, whole), placed(state, three, whole))
                self.expect_equal(jax.device_get(updates), expected[4])
                found, _ = self.run_steps(self.transformation(method=method, factors=factors), state, first=4, steps=2)
                self.expect_equal(found[1], expected[5])

    def test_a_step_on_a_mesh_that_is_not_finite_changes_nothing(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
        transformation = self.transformation(mesh=mesh)
        update, state = jax.jit(transformation.update), transformation.init(gradients(0))
        bad = gradients(0)
        bad["dense"]["kernel"] = bad["dense"]["kernel"].at[5].set(jnp.inf)
        updates, state = update(bad, state)
        self.assertTrue(all(not leaf.any() for leaf in jax.tree_util.tree_leaves(updates)))
        updates, state = update(gradients(0), state)
        again, _ = self.run_steps(self.transformation(), steps=1)
        self.expect_equal(jax.device_get(updates), again[0])

    def test_arrays_for_which_jax_could_wait_without_limit_are_refused(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
        transformation, grads = self.transformation(mesh=mesh), [jnp.ones((1024, 1024))]
        with self.assertRaisesRegex(precondor.UnimplementedError, "mesh: expected shares of up to 65536 bytes on CPU devices, got 1048576"):
            transformation.update(grads, transformation.init(grads))

    def test_scanned_layers_are_layers_of_their_own(self):
        def stacked(step):
            return {"blocks": jnp.stack([gradients(step + 100 * layer)["dense"]["kernel"] for layer in range(3)]),
                    "head": gradients(step)["dense"]["kernel"]}

        transformation = self.transformation(scanned_layers={"blocks": True, "head": False}, layer_methods={r"blocks\.1": "muon"})
        apart = self.transformation(layer_methods={"1": "muon"})
        update, update_apart = jax.jit(transformation.update), jax.jit(apart.update)
        state = state_apart = None
        for step in range(4):
            grads = stacked(step)
            leaves = [*grads["blocks"], grads["head"]]
            state, state_apart = state or transformation.init(grads), state_apart or apart.init(leaves)
            updates, state = update(grads, state)
            expected, state_apart = update_apart(leaves, state_apart)
            self.expect_equal([*updates["blocks"], updates["head"]], expected)
        self.assertEqual([layer.name for layer in transformation.spec.layers], ["blocks.0", "blocks.1", "blocks.2", "head"])
        with self.assertRaisesRegex(precondor.InvalidArgumentError, "scanned_layers: expected a tree like that of the updates"):
            self.transformation(scanned_layers={"blocks": True}).init(stacked(0))

    def test_kron_takes_the_arguments_of_distributed_krons(self):
        # Sizes, shardings and options like those of the package's own example, which its users begin from.
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "pipeline"))
        spec = jax.sharding.PartitionSpec
        shardings = {name: jax.sharding.NamedSharding(mesh, one) for name, one in {
            "w1_scan": spec("pipeline", None, "fsdp"), "w2": spec("fsdp", None, None), "b1": spec(None)}.items()}
        shapes = {"w1_scan": (2, 32, 64), "w2": (64, 20, 2), "b1": (64,)}
        arguments = dict(
            b1=0.9, max_size_triangular=8192, min_ndim_triangular=2, memory_save_mode=None, mu_dtype=jnp.float32, precond_dtype=None,
            precond_update_precision="tensorfloat32", precond_grads_precision=None, lax_map_scanned_layers=False, lax_map_batch_size=8,
            scanned_layers={"w1_scan": True, "w2": False, "b1": False}, merge_small_dims=True, target_merged_dim_size=4096,
            partition_grads_into_blocks=True, block_size=16)
        rate = optax.linear_schedule(0.1, 0.0, 10)
        optimizer = precondor.optax.kron(rate, address=self.server.address, mesh=mesh, weight_decay=0.01,
                                         weight_decay_mask={"w1_scan": True, "w2": True, "b1": False}, **arguments)
        self.addCleanup(optimizer.close, end_session=True)
        expected_from = self.transformation(scanned_layers=arguments["scanned_layers"], b1=0.9, method=precondor.Method("kron", {
            "momentum": 0.9, "max_size_triangular": 8192, "min_ndim_triangular": 2, "merge_small_dims": True,
            "target_merged_dim_size": 4096, "block_size": 16}))
        random = np.random.default_rng(3)
        params = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        start = jax.device_put(params, shardings)
        state = jax.jit(optimizer.init)(start)
        state_shardings = jax.tree_util.tree_map(lambda leaf: jax.sharding.NamedSharding(mesh, spec()), state)

        @functools.partial(jax.jit, in_shardings=(shardings, state_shardings, shardings), out_shardings=(shardings, state_shardings),
                           donate_argnums=(1, 2))
        def step(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state, expected, other = jax.device_put(state, state_shardings), params, expected_from.init(params)
        for number in range(4):
            grads = {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
            start, state = step(jax.device_put(grads, shardings), state, start)
            updates, other = jax.jit(expected_from.update)(grads, other)
            expected = {name: expected[name] - rate(number) * (updates[name] + (0.01 * expected[name] if name != "b1" else 0))
                        for name in shapes}
        jax.tree_util.tree_map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5), jax.device_get(start), expected)
        with self.assertRaisesRegex(precondor.InvalidArgumentError, "preconditioner_update_probability: expected a number, got <function"):
            precondor.optax.kron(preconditioner_update_probability=lambda step: 1.0)

    def test_accumulation_by_multi_steps_is_refused(self):
        for jitted in (True, False):
            for skip in (None, optax.skip_not_finite):
                with self.subTest(jitted=jitted, skip=skip):
                    optimizer = optax.MultiSteps(optax.chain(self.transformation(), optax.scale_by_learning_rate(0.1)), 2, True, skip)
                    state, update = optimizer.init(gradients(0)), jax.jit(optimizer.update) if jitted else optimizer.update
                    # JAX loses an error of a call that is not compiled; the next call raises it.
                    with self.assertRaisesRegex((jax.errors.JaxRuntimeError, precondor.FailedPreconditionError),
                                                "step 0 has been made.* optax.MultiSteps .*call `update` once"):
                        for step in range(3):
                            updates, state = jax.block_until_ready(update(gradients(step), state))

    def test_a_loss_is_a_number_or_unknown(self):
        transformation = self.transformation()
        state = transformation.init(gradients(0))
        _, state = transformation.update(gradients(0), state, value=None)
        with self.assertRaisesRegex(precondor.InvalidArgumentError, r"value: expected the step's loss, got an array of shape \(2,\)"):
            transformation.update(gradients(1), state, value=jnp.ones(2))

    def test_a_failed_step_can_be_tried_again(self):
        transformation, expected = self.transformation(), self.run_steps(self.transformation(), steps=2)[0]
        state = transformation.init(gradients(0))
        with mock.patch.object(transformation.connection, "_exchange", side_effect=precondor.UnavailableError("gone")):
            with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "gone"):
                jax.block_until_ready(transformation.update(gradients(0), state))
        for step in range(2):
            updates, state = transformation.update(gradients(step), state)
            self.expect_equal(updates["dense"]["kernel"], expected[step]["dense"]["kernel"])
        # The next step has the error that JAX has lost.
        transformation.connection._failures[0] = 1, precondor.UnavailableError("gone")  # pylint: disable=protected-access
        with self.assertRaisesRegex(precondor.UnavailableError, "gone"):
            transformation.update(gradients(2), state)
        # A compiled one raises it until a call outside of jit has.
        compiled = jax.jit(transformation.update).lower(gradients(2), state).compile()
        transformation.connection._failures[0] = 1, precondor.UnavailableError("gone")  # pylint: disable=protected-access
        for step in (2, 1):
            now = state._replace(step=jnp.int32(step))
            now.connection = state.connection
            with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "gone"):
                jax.block_until_ready(compiled(gradients(2), now))
        with self.assertRaisesRegex(precondor.UnavailableError, "gone"):
            transformation.update(gradients(2), state)
        transformation.update(gradients(2), state)

    def test_the_mean_of_several_batches_is_one_step(self):  # as docs/use/jax.md has it
        transformation, other = self.transformation(), self.transformation()
        batches = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *(gradients(step) for step in range(4)))

        def loss_of(params, batch):
            return sum(jnp.vdot(one, two) for one, two in zip(jax.tree_util.tree_leaves(params), jax.tree_util.tree_leaves(batch)))

        @jax.jit
        def step(params, state, batches):
            def add(total, batch):
                return jax.tree_util.tree_map(jnp.add, total, jax.value_and_grad(loss_of)(params, batch)), None

            zeros = jax.tree_util.tree_map(jnp.zeros_like, (jnp.float32(0), params))
            total, _ = jax.lax.scan(add, zeros, batches)
            loss, grads = jax.tree_util.tree_map(lambda leaf: leaf / 4, total)
            return transformation.update(grads, state, params, value=loss)

        updates, state = step(gradients(9), transformation.init(gradients(0)), batches)
        mean = jax.tree_util.tree_map(lambda leaf: sum(leaf) / 4, batches)
        expected, _ = jax.jit(other.update)(mean, other.init(mean))
        self.assertEqual(int(state.step), 1)
        jax.tree_util.tree_map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4), updates, expected)

    def test_a_factory_that_runs_in_each_trace_has_one_session(self):
        expected, _ = self.run_steps(self.transformation(), steps=6)
        sessions = []

        def open_session(client, spec):
            sessions.append(spec.name)
            return original(client, spec)

        original = precondor.Client.open_session
        with mock.patch.object(precondor.Client, "open_session", open_session):
            for jitted in (True, False):
                optimizer = optax.inject_hyperparams(lambda rate: optax.chain(self.transformation(), optax.scale(rate)))(rate=0.5)

                def update(grads, state, batch, optimizer=optimizer):
                    return *optimizer.update(grads, state), batch.sum()

                step = jax.jit(update) if jitted else update
                state = jax.jit(optimizer.init)(gradients(0))
                for number in range(5):
                    updates, state, _ = step(gradients(number), state, jnp.ones(3 if number == 2 else 8))
                    self.expect_equal(jax.device_get(updates)["dense"]["kernel"], 0.5 * expected[number]["dense"]["kernel"])
                state.hyperparams["rate"] = jnp.float32(0.25)
                state, updates = jax.lax.scan(lambda state, grads: optimizer.update(grads, state)[::-1], state,
                                              jax.tree_util.tree_map(lambda leaf: leaf[None], gradients(5)))
                self.expect_equal(updates["dense"]["kernel"][0], 0.25 * expected[5]["dense"]["kernel"])
            self.assertEqual(len(sessions), 2)  # a run each
            kron = optax.inject_hyperparams(lambda rate, decay: precondor.optax.kron(rate, weight_decay=decay, address=self.server.address))
            optimizer = kron(rate=0.1, decay=0.01)
            state = optimizer.init(gradients(0))
            self.addCleanup(state.inner_state[0].connection.close, True)
            for number in range(2):
                _, state = jax.jit(optimizer.update)(gradients(number), state, gradients(0))
            self.assertEqual((len(sessions), int(state.inner_state[0].step)), (3, 2))

    def test_a_state_is_copied_and_saved_without_its_connection(self):
        state = self.transformation().init(gradients(0))
        for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), precondor.optax.PrecondorState(*state)):
            self.assertIsNone(copied.connection)
            self.expect_equal(tuple(copied), tuple(state))
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        self.assertEqual((paths[0], paths[1][:8]), (".step", ".vectors"))

    def test_wrappers_that_ask_for_some_steps_or_leaves(self):
        expected, _ = self.run_steps(self.transformation(), steps=2)
        bad = jax.tree_util.tree_map(lambda leaf: leaf * jnp.nan, gradients(1))
        for wrapped in (optax.apply_if_finite(self.transformation(), 3),
                        optax.multi_transform({"ours": self.transformation(), "none": optax.set_to_zero()},
                                              {"conv": "ours", "dense": "ours", "scale": "none", "row": "none"})):
            state, update = wrapped.init(gradients(0)), jax.jit(wrapped.update)
            for number, grads in enumerate((gradients(0), bad, gradients(1))):
                updates, state = update(grads, state)
                if number != 1:
                    self.expect_equal(jax.device_get(updates)["dense"], expected[min(number, 1)]["dense"])

    def test_a_later_process_goes_on(self):
        first = self.transformation(session=self.name)
        found, state = self.run_steps(first, steps=5)
        first.close()
        again = self.transformation(session=self.name)
        more, _ = self.run_steps(again, state, first=5, steps=3)
        expected, _ = self.run_steps(self.transformation(), steps=8)
        for one, other in zip(found + more, expected):
            self.expect_equal(one, other)
        fresh = self.transformation()
        with self.assertWarnsRegex(UserWarning, "is new and the state is of step 5"):
            self.run_steps(fresh, state, first=5, steps=1)

    def test_saved_factors_go_on_under_another_name(self):
        for method in ("soap", "muon", "kron"):
            with self.subTest(method=method):
                first = self.transformation(method=method)
                with self.assertRaisesRegex(precondor.FailedPreconditionError, "expected a step before it"):
                    first.read_factors()
                found, state = self.run_steps(first, steps=5)
                factors = first.read_factors()
                expected, _ = self.run_steps(first, state, first=5, steps=3)
                again = self.transformation(method=method, factors=factors)
                more, _ = self.run_steps(again, state, first=5, steps=3)
                for one, other in zip(more, expected):
                    self.expect_equal(one, other)
                late = self.transformation(method=method, factors=factors)
                with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "expected those of the state's step 8, got those of step 5"):
                    jax.block_until_ready(jax.jit(late.update)(gradients(8), state._replace(step=state.step + 3)))

    def test_closes_without_servers(self):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(self.program, folder)
            lost = precondor.optax.scale_by_precondor(server.address, client=precondor.ClientOptions(rpc_timeout=0.5))
            self.run_steps(lost, steps=1)
            server.stop()
        lost.close()
        lost.close()

    def test_closes_after_its_own_server(self):
        local = self.transformation(address="local")
        self.run_steps(local, steps=1)
        precondor.server.shared().close()
        with mock.patch.object(precondor.Client, "close_session") as close:
            local.close(end_session=True)
        close.assert_not_called()

    def test_what_is_refused(self):
        refused = precondor.InvalidArgumentError
        for options, pattern in (({"method": "moun"}, "method: expected one of kron, soap, muon, which .* got moun"),
                                 ({"method": None}, "method: expected a name"), ({"layer_methods": ["x"]}, "layer_methods: expected a dict"),
                                 ({"mesh": 3}, "mesh: expected a jax.sharding.Mesh, got 3"), ({"factors": 3}, "factors: .*got 3"),
                                 ({"client": "x"}, "client: expected a precondor.ClientOptions, got 'x'"),
                                 ({"client": precondor.ClientOptions(replace=True)}, "client: expected replace and local_memory with their defaults"),
                                 ({"client": precondor.ClientOptions(local_memory=0.5)}, "client: expected replace and local_memory"), ({"session": 3}, "session: .*3"), ({"address": None}, "address: .*None")):
            with self.subTest(options=options), self.assertRaisesRegex(refused, f"^{pattern}"):
                precondor.optax.scale_by_precondor(**options)
        with self.assertRaisesRegex(refused, "method: expected one of kron, soap, muon, .* got mkor"):
            self.transformation(method="mkor")
        with self.assertRaisesRegex(refused, "layer_methods: 'x': expected one of"):
            self.transformation(layer_methods={"x": "mkor"})
        vectors = [jnp.ones(3)]
        with self.assertRaisesRegex(refused, r"expected a tree with a real array of two or more dimensions, got \{'0': \(3,\)\}"):
            self.transformation().init(vectors)
        unmatched = self.transformation(layer_methods={"head": "muon"})
        with self.assertRaisesRegex(refused, r"no layer's whole name matches 'head'; there are \['conv.kernel', 'dense.kernel'\]"):
            self.run_steps(unmatched)
        used = self.transformation()
        self.run_steps(used, steps=1)
        with self.assertRaisesRegex(refused, r"expected the tree of the first call, .*'0': \[2, 2\]"):
            used.update([jnp.ones((2, 2))], used.init([jnp.ones((2, 2))]))
        update, state = jax.jit(used.update), used.init(gradients(0))
        _, state = update(gradients(1), state._replace(step=state.step + 1))
        used.close()
        with self.assertRaisesRegex(precondor.FailedPreconditionError, "closed"):
            used.update(gradients(2), state)
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "not connected"):  # compiled before
            jax.block_until_ready(update(gradients(2), state))
        with mock.patch.object(jax, "process_count", return_value=2):
            with self.assertRaisesRegex(refused, "mesh: expected one with devices of all 2 processes, got devices of 1"):
                self.run_steps(self.transformation())
        with self.assertRaises(precondor.UnavailableError):
            self.run_steps(self.transformation(address="unix:/nonexistent/socket", client=precondor.ClientOptions(connect_timeout=0.2)))


if __name__ == "__main__":
    def begin(server):
        OptaxTest.server = server

    OptaxTest.program = test_program.parse("--server").server
    test_program.run_with_server(OptaxTest.program, begin)
