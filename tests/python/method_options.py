# SPDX-License-Identifier: Apache-2.0
"""A value other than the default for every option of every method.

Each method has one or more combinations that a server on the CPU accepts as a whole; together they have all options.
check_complete compares them with the messages of common.proto, of which wire_method_options_test knows that they have
the options of the registry.
"""

COMBINATIONS = {
    "mkor": (
        {"rule": "BLEND", "representation": "DENSE", "rank": 32, "gamma": 0.875, "damping": 0.5, "scaling": "RMS_CLIP",
         "scaling_clip": 2.5, "clip": 50.5, "zeta": 0.75, "norm_threshold": 20.5, "max_factor_dim": 4096,
         "storage": "F16", "products": "TF32"},
        {"rule": "REFERENCE", "products": "TF32"},
    ),
    "identity": ({},),
    "eva": ({"mu": 0.25, "weight": 0.5, "row_scale": 3.0, "scaling": "NONE", "scaling_clip": 0.5},),
    "kfac": (
        {"form": "EIGEN", "prediv": True, "pi_split": True, "stagger": False, "damping": "exponential(0.1, 0.5, 0.01)",
         "factor_decay": "piecewise(0, 1: 0.5)", "factor_update_steps": "2", "inv_update_steps": "linear(1, 9, 100)",
         "accumulation_steps": 3, "row_scale": 2.5, "scaling": "RMS_CLIP", "scaling_clip": "0.75", "refresh_lag": 2},
        {"form": "INVERSE"},
    ),
    "kron": (
        {"momentum": 0.5, "precondition_lr": 0.25, "init_scale": 2.5,
         "max_update_probability": 0.875, "min_update_probability": 0.125, "update_decay": 0.5,
         "update_flat_steps": 250.5, "balance_probability": 0.5, "max_size_triangular": 1024,
         "memory_save_mode": "ONE_DIAG", "block_size": 512, "rms_clip": 1.5, "seed": 2147483647,
         "min_ndim_triangular": 0, "max_skew": 16.5, "merge_small_dims": False, "target_merged_dim_size": 128},
    ),
    "soap": (
        {"rule": "SHAMPOO", "momentum": 0.5, "second_moment_decay": 0.25, "covariance_decay": 0.75, "epsilon": 0.125,
         "refresh_interval": 7, "max_factor_dim": 0, "precondition_1d": True, "merge_small_dims": False,
         "target_merged_dim_size": 64, "precision": "F32"},
    ),
    "muon": ({"momentum": 0.5, "nesterov": False, "ns_steps": 7, "scale": "ORIGINAL", "epsilon": 0.125,
              "precision": "TF32", "input_factor": True, "damping": 0.5, "covariance_decay": 0.75, "refresh_interval": 3,
              "max_factor_dim": 64},),
}


def each():
    """(a name for a session, method, options) of every combination."""
    for method, combinations in COMBINATIONS.items():
        for number, options in enumerate(combinations):
            yield f"options-{method}-{number}", method, options


def messages(common_pb2):
    """The descriptor of each method's message, by the method's name."""
    fields = common_pb2.MethodConfig.DESCRIPTOR.oneofs_by_name["method"].fields
    return {field.name: field.message_type for field in fields}


def check_complete(test, common_pb2):
    """Every field of every method's message has a value above, and nothing else has one."""
    test.assertEqual({method: set().union(*combinations) for method, combinations in COMBINATIONS.items()},
                     {method: {field.name for field in message.fields}
                      for method, message in messages(common_pb2).items()})


def as_sent(method_config):
    """(method, options) of a MethodConfig: the fields that are present."""
    method = method_config.WhichOneof("method")
    return method, {field.name: value for field, value in getattr(method_config, method).ListFields()}
