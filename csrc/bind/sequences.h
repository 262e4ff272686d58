// Python's lists and tuples as the bindings of plans and drafts read them: where they lie, without
// a copy. What is read out of bounds is checked; what the numbers mean is the caller's business.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paceline {

// The elements of a list or tuple; of anything else that can be iterated over, of a copy of it.
class Items {
  public:
    explicit Items(nanobind::handle source, const char* what)
        : owner_(nanobind::steal(PySequence_Fast(source.ptr(), what))) {
        if (!owner_.is_valid()) {
            throw nanobind::python_error();
        }
        size_ = static_cast<size_t>(PySequence_Fast_GET_SIZE(owner_.ptr()));
    }
    size_t size() const { return size_; }
    PyObject* operator[](size_t i) const { return PySequence_Fast_ITEMS(owner_.ptr())[i]; }

  private:
    nanobind::object owner_;
    size_t size_;
};

inline double to_double(PyObject* value) {
    if (PyFloat_CheckExact(value)) {
        return PyFloat_AS_DOUBLE(value);
    }
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
        throw nanobind::python_error();
    }
    return number;
}

inline long to_long(PyObject* value) {
    const long number = PyLong_AsLong(value);
    if (number == -1 && PyErr_Occurred()) {
        throw nanobind::python_error();
    }
    return number;
}

// A sequence of whole numbers, clamped to 32 bits. Items that are none raise TypeError.
inline std::vector<int32_t> to_integers(nanobind::handle sequence, const char* what) {
    const Items items(sequence, what);
    std::vector<int32_t> numbers(items.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
        const long value = to_long(items[i]);
        numbers[i] = static_cast<int32_t>(
            std::clamp(value, static_cast<long>(INT32_MIN), static_cast<long>(INT32_MAX)));
    }
    return numbers;
}

// An attribute's name, made once: those of trees and limits are read in every step.
inline PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

inline nanobind::object attribute(PyObject* owner, PyObject* name) {
    PyObject* value = PyObject_GetAttr(owner, name);
    if (!value) {
        throw nanobind::python_error();
    }
    return nanobind::steal(value);
}

inline void set_attribute(PyObject* owner, PyObject* name, nanobind::handle value) {
    if (PyObject_SetAttr(owner, name, value.ptr()) != 0) {
        throw nanobind::python_error();
    }
}

// Of a list of token ids, its i-th one.
inline auto token_at(const nanobind::list& tokens) {
    return [&tokens](size_t i) { return nanobind::cast<int32_t>(tokens[i]); };
}

// A list of known length; `make(i)` returns a new reference to its element.
template <typename Make>
nanobind::object make_list(size_t count, Make make) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(count));
    if (!list) {
        throw nanobind::python_error();
    }
    nanobind::object owner = nanobind::steal(list);
    for (size_t i = 0; i < count; ++i) {
        PyObject* item = make(i);
        if (!item) {
            throw nanobind::python_error();
        }
        PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
    }
    return owner;
}

inline nanobind::object to_list(const std::vector<double>& values) {
    return make_list(values.size(), [&](size_t i) { return PyFloat_FromDouble(values[i]); });
}

inline nanobind::object to_list(const std::vector<int32_t>& values) {
    return make_list(values.size(), [&](size_t i) { return PyLong_FromLong(values[i]); });
}

}  // namespace paceline
