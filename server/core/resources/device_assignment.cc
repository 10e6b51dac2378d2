// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/device_assignment.h"

#include <algorithm>
#include <optional>

#include "server/core/resources/placement_input.h"
#include "server/core/resources/reservation.h"

namespace precondor {
namespace {

enum class Order : uint8_t { kByCost, kBySize, kUnbounded };

class Assigner {
 public:
  Assigner(const SessionSpec& spec, const MethodSet& methods, int window_steps,
           absl::Span<const AssignmentDevice> devices)
      : devices_(devices), sums_(spec, methods, window_steps, Parallelism(devices)), layers_(devices.size()) {
    for (const AssignmentDevice& device : devices) loads_.push_back(device.load);
  }

  void Put(size_t device, uint32_t layer, double cost) {
    sums_.Include(device, layer);
    loads_[device] += cost;
    layers_[device].push_back(layer);
  }

  // Returns the device for the next layer, or nullopt if no device has room for it.
  std::optional<size_t> Choose(Order order, uint32_t layer) const {
    std::optional<size_t> best;
    int64_t best_room = 0;
    for (size_t device = 0; device < devices_.size(); ++device) {
      ReservationSums with = sums_;
      with.Include(device, layer);
      const int64_t room = RoomLeft(with, device);
      if (order != Order::kUnbounded && room < 0) continue;
      if (best.has_value()) {
        const bool by_load = order != Order::kBySize && loads_[device] != loads_[*best];
        const bool better = order == Order::kBySize ? room < best_room : room > best_room;
        if (by_load ? loads_[device] > loads_[*best] : !better) continue;
      }
      best = device;
      best_room = room;
    }
    return best;
  }

  LayersOfDevices Take() {
    for (std::vector<uint32_t>& layers : layers_) std::sort(layers.begin(), layers.end());
    return std::move(layers_);
  }

 private:
  static std::vector<int> Parallelism(absl::Span<const AssignmentDevice> devices) {
    std::vector<int> parallelism;
    parallelism.reserve(devices.size());
    for (const AssignmentDevice& device : devices) parallelism.push_back(device.parallelism);
    return parallelism;
  }
  int64_t RoomLeft(const ReservationSums& sums, size_t device) const {
    return devices_[device].free_bytes - sums.reservation(device).total();
  }

  const absl::Span<const AssignmentDevice> devices_;
  ReservationSums sums_;
  std::vector<double> loads_;
  LayersOfDevices layers_;
};

}  // namespace

LayersOfDevices AssignDevices(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                              int window_steps, absl::Span<const AssignmentDevice> devices) {
  if (devices.size() == 1) return {std::vector<uint32_t>(layers.begin(), layers.end())};
  const std::vector<PlacementLayer> estimates = EstimateLayers(spec, methods);
  for (const Order order : {Order::kByCost, Order::kBySize, Order::kUnbounded}) {
    Assigner assigner(spec, methods, window_steps, devices);
    std::vector<uint32_t> sorted(layers.begin(), layers.end());
    std::stable_sort(sorted.begin(), sorted.end(), [&](uint32_t x, uint32_t y) {
      return order == Order::kBySize ? estimates[x].bytes > estimates[y].bytes : estimates[x].cost > estimates[y].cost;
    });
    const bool all = std::all_of(sorted.begin(), sorted.end(), [&](uint32_t layer) {
      const std::optional<size_t> device = assigner.Choose(order, layer);
      if (device.has_value()) assigner.Put(*device, layer, estimates[layer].cost);
      return device.has_value();
    });
    if (all) return assigner.Take();
  }
  return {};  // not reached: kUnbounded always finds a device
}

}  // namespace precondor
