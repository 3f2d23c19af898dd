/* Replay.__call__ and Plan.run (replay.py) and Quick.__call__ (launch.py), without the interpreter.

   This file knows neither torch nor CUDA: it calls the same functions as the Python code to allocate tensors and to
   start kernels. Plans and launches are the tuples of the Python code. */
#include <Python.h>

/* The fields of Plan and Quick. */
enum { GIVEN, DEVICE, EMPTY, LAYOUTS, WORKSPACE, OFFSETS, NUMBERS, LAUNCHES, RESULTS, CURRENT_DEVICE, RAW_STREAM, OF_PLAN };
enum { LAUNCH, GRID, FIXED, SPREAD, SLOWLY, RUNTIME, DESCRIBED, OF_QUICK };

static PyObject *data_ptr, *enter_hook, *exit_hook, *calls, *run_name; /* names of attributes */
static PyObject *zero;

static PyObject *at(PyObject *tuple, Py_ssize_t place) {
    return PyTuple_GET_ITEM(tuple, place);
}

/* values[places[0]], values[places[1]], ... */
static PyObject *selected(PyObject *places, PyObject **values) {
    PyObject *arguments = PyTuple_New(PyTuple_GET_SIZE(places));
    for (Py_ssize_t i = 0; arguments && i < PyTuple_GET_SIZE(places); i++)
        PyTuple_SET_ITEM(arguments, i, Py_NewRef(values[PyLong_AsSsize_t(at(places, i))]));
    return arguments;
}

/* As Quick.with_descriptors. */
static PyObject *with_descriptors(PyObject *described, PyObject *arguments) {
    PyObject *all = PySequence_List(arguments);
    for (Py_ssize_t i = PyTuple_GET_SIZE(described) - 1; all && i >= 0; i--) { /* the last first: places stay */
        Py_ssize_t place = PyLong_AsSsize_t(at(at(described, i), 0));
        PyObject *parts = PyObject_GetItem(at(at(described, i), 1), at(arguments, place));
        if (!parts || PyList_SetSlice(all, place, place + 1, parts) < 0)
            Py_CLEAR(all);
        Py_XDECREF(parts);
    }
    return all;
}

/* Whether a launch hook is set; -1 for an error. */
static int hooked(PyObject *runtime) {
    PyObject *names[] = {enter_hook, exit_hook};
    int found = 0;
    for (int i = 0; i < 2 && !found; i++) {
        PyObject *hook = PyObject_GetAttr(runtime, names[i]);
        PyObject *set = hook ? PyObject_GetAttr(hook, calls) : NULL;
        found = set ? PyObject_IsTrue(set) : -1;
        Py_XDECREF(hook);
        Py_XDECREF(set);
    }
    if (found < 0 && PyErr_ExceptionMatches(PyExc_AttributeError)) { /* None or a function, which Triton takes too */
        PyErr_Clear();
        found = 1;
    }
    return found;
}

/* launch(*grid, stream, *fixed, arguments), or with *arguments */
static PyObject *launched(PyObject *quick, PyObject *stream, PyObject *arguments) {
    PyObject *grid = at(quick, GRID), *fixed = at(quick, FIXED);
    Py_ssize_t before = PyTuple_GET_SIZE(grid), between = PyTuple_GET_SIZE(fixed), next = 0;
    int spread = at(quick, SPREAD) == Py_True;
    Py_ssize_t last = spread ? PySequence_Fast_GET_SIZE(arguments) : 1;
    PyObject **items = spread ? PySequence_Fast_ITEMS(arguments) : &arguments;
    PyObject *all = PyTuple_New(before + 1 + between + last);
    if (!all)
        return NULL;
    for (Py_ssize_t i = 0; i < before; i++)
        PyTuple_SET_ITEM(all, next++, Py_NewRef(at(grid, i)));
    PyTuple_SET_ITEM(all, next++, Py_NewRef(stream));
    for (Py_ssize_t i = 0; i < between; i++)
        PyTuple_SET_ITEM(all, next++, Py_NewRef(at(fixed, i)));
    for (Py_ssize_t i = 0; i < last; i++)
        PyTuple_SET_ITEM(all, next++, Py_NewRef(items[i]));
    PyObject *done = PyObject_Call(at(quick, LAUNCH), all, NULL);
    Py_DECREF(all);
    return done;
}

/* start(stream, arguments); 0, or -1 for an error */
static int started(PyObject *start, PyObject *stream, PyObject *arguments) {
    PyObject *function = start, *done = NULL;
    if (PyTuple_Check(start)) { /* a Quick */
        int slowly = hooked(at(start, RUNTIME));
        if (slowly < 0)
            return -1;
        function = slowly ? at(start, SLOWLY) : NULL;
    }
    if (function) {
        PyObject *given[] = {stream, arguments};
        done = PyObject_Vectorcall(function, given, 2, NULL);
    } else if (PyTuple_GET_SIZE(at(start, DESCRIBED))) {
        PyObject *all = with_descriptors(at(start, DESCRIBED), arguments);
        done = all ? launched(start, stream, all) : NULL;
        Py_XDECREF(all);
    } else {
        done = launched(start, stream, arguments);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *list_of(PyObject **values, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(values[i]));
    return list;
}

static PyObject *address_of(PyObject *tensor) {
    return tensor == Py_None ? Py_NewRef(zero) : PyObject_CallMethodNoArgs(tensor, data_ptr);
}

/* The plan's stream; NULL with *results set if another device is current, where Python runs the plan. */
static PyObject *stream_of(PyObject *plan, PyObject *tensors, PyObject **addresses, PyObject **results) {
    PyObject *device = at(plan, DEVICE);
    if (device == Py_None)
        return Py_NewRef(Py_None);
    PyObject *current = PyObject_CallNoArgs(at(plan, CURRENT_DEVICE)), *stream = NULL;
    int same = current ? PyObject_RichCompareBool(current, device, Py_EQ) : -1;
    if (same > 0) {
        stream = PyObject_CallOneArg(at(plan, RAW_STREAM), device);
    } else if (same == 0) {
        PyObject *list = list_of(addresses, PyLong_AsSsize_t(at(plan, GIVEN)));
        *results = list ? PyObject_CallMethodObjArgs(plan, run_name, tensors, list, NULL) : NULL;
        Py_XDECREF(list);
    }
    Py_XDECREF(current);
    return stream;
}

static PyObject *results_of(PyObject *plan, PyObject *tensors, PyObject *made) {
    PyObject *places = at(plan, RESULTS);
    if (places == Py_None)
        return Py_NewRef(made);
    Py_ssize_t given = PySequence_Fast_GET_SIZE(tensors), count = PyTuple_GET_SIZE(places);
    PyObject *results = PyTuple_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        Py_ssize_t place = PyLong_AsSsize_t(at(places, i));
        PyObject *result = Py_None;
        if (place >= 0)
            result = place < given ? PySequence_Fast_GET_ITEM(tensors, place) : PyList_GET_ITEM(made, place - given);
        PyTuple_SET_ITEM(results, i, Py_NewRef(result));
    }
    return results;
}

/* Allocates tensors and scratch memory, and writes their addresses behind those that are there. values: room for all.
   *workspace: the tensor with the scratch memory. Returns the tensors. *held counts the addresses, also after an error. */
static PyObject *allocated(PyObject *plan, PyObject **values, Py_ssize_t *held, PyObject **workspace) {
    PyObject *layouts = at(plan, LAYOUTS), *offsets = at(plan, OFFSETS), *base = NULL;
    PyObject *made = PyList_New(PyTuple_GET_SIZE(layouts));
    for (Py_ssize_t i = 0; made && i < PyTuple_GET_SIZE(layouts); i++) {
        PyObject *tensor = PyObject_Call(at(plan, EMPTY), at(layouts, i), NULL);
        if (tensor)
            PyList_SET_ITEM(made, i, tensor);
        if (tensor && (values[*held] = address_of(tensor)))
            ++*held;
        else
            Py_CLEAR(made);
    }
    if (!made || !PyTuple_GET_SIZE(offsets))
        return made;
    if ((*workspace = PyObject_Call(at(plan, EMPTY), at(plan, WORKSPACE), NULL)))
        base = address_of(*workspace);
    for (Py_ssize_t i = 0; base && made && i < PyTuple_GET_SIZE(offsets); i++) {
        if ((values[*held] = PyNumber_Add(base, at(offsets, i))))
            ++*held;
        else
            Py_CLEAR(made);
    }
    if (!base)
        Py_CLEAR(made);
    Py_XDECREF(base);
    return made;
}

/* As Plan.run. addresses: of the given tensors; the caller holds them. */
static PyObject *run(PyObject *plan, PyObject *tensors, PyObject **addresses) {
    PyObject *numbers = at(plan, NUMBERS), *launches = at(plan, LAUNCHES), *workspace = NULL, *results = NULL;
    Py_ssize_t given = PySequence_Fast_GET_SIZE(tensors), held = given, count = PyTuple_GET_SIZE(numbers);
    PyObject *stream = stream_of(plan, tensors, addresses, &results);
    if (!stream)
        return results;
    Py_ssize_t room = given + PyTuple_GET_SIZE(at(plan, LAYOUTS)) + PyTuple_GET_SIZE(at(plan, OFFSETS)) + count;
    PyObject **values = PyMem_New(PyObject *, room), *made = NULL;
    if (values) {
        memcpy(values, addresses, given * sizeof(PyObject *));
        made = allocated(plan, values, &held, &workspace);
    } else {
        PyErr_NoMemory();
    }
    if (made) {
        for (Py_ssize_t i = 0; i < count; i++)
            values[held + i] = at(numbers, i);
        int failed = 0;
        for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(launches); i++) {
            PyObject *arguments = selected(at(at(launches, i), 1), values);
            failed = !arguments || started(at(at(launches, i), 0), stream, arguments) < 0;
            Py_XDECREF(arguments);
        }
        results = failed ? NULL : results_of(plan, tensors, made);
    }
    for (Py_ssize_t i = given; i < held; i++)
        Py_DECREF(values[i]);
    PyMem_Free(values);
    Py_XDECREF(workspace);
    Py_XDECREF(made);
    Py_DECREF(stream);
    return results;
}

/* As in Replay.__call__: None if every tensor is there and aligned. */
static PyObject *key_of(PyObject **addresses, Py_ssize_t count) {
    unsigned long long all = 0;
    int missing = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long address = PyLong_AsUnsignedLongLong(addresses[i]);
        all |= address;
        missing |= !address;
    }
    if (PyErr_Occurred())
        return NULL;
    int aligned = !(all & 15);
    if (aligned && !missing)
        return Py_NewRef(Py_None);
    PyObject *key = PyTuple_New(count);
    for (Py_ssize_t i = 0; key && i < count; i++) {
        unsigned long long address = PyLong_AsUnsignedLongLong(addresses[i]);
        if (aligned)
            PyTuple_SET_ITEM(key, i, PyBool_FromLong(address != 0));
        else /* a number below 16 is never allocated, so this does not fail */
            PyTuple_SET_ITEM(key, i, address ? PyLong_FromLong(address & 15) : Py_NewRef(Py_None));
    }
    return key;
}

static PyObject *call(PyObject *const *replay, PyObject *tensors, PyObject **addresses) {
    PyObject *plans = replay[0], *function = replay[1], *first_call = replay[2], *results = NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
    PyObject *key = key_of(addresses, count);
    PyObject *plan = key ? PyDict_GetItemWithError(plans, key) : NULL;
    if (plan == Py_None) {
        results = PyObject_CallOneArg(function, tensors);
    } else if (plan) {
        Py_INCREF(plan); /* another thread may drop the plans */
        if (!PyTuple_Check(plan) || PyTuple_GET_SIZE(plan) != OF_PLAN || PyLong_AsSsize_t(at(plan, GIVEN)) != count)
            PyErr_SetString(PyExc_TypeError, "no plan for these tensors");
        else
            results = run(plan, tensors, addresses);
        Py_DECREF(plan);
    } else if (!PyErr_Occurred()) {
        PyObject *list = list_of(addresses, count);
        results = list ? PyObject_CallFunctionObjArgs(first_call, tensors, list, key, NULL) : NULL;
        Py_XDECREF(list);
    }
    Py_XDECREF(key);
    return results;
}

PyDoc_STRVAR(replay_doc, "replay(plans, function, first_call, tensors)\n--\n\nReplay.__call__ of a Replay with these.");

static PyObject *replay(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4 || !PyDict_Check(arguments[0]))
        return PyErr_Format(PyExc_TypeError, "takes plans, function, first_call, tensors");
    PyObject *tensors = PySequence_Fast(arguments[3], "takes a sequence of tensors"), *results = NULL;
    if (!tensors)
        return NULL;
    Py_ssize_t given = PySequence_Fast_GET_SIZE(tensors), found = 0;
    PyObject **addresses = PyMem_New(PyObject *, given);
    if (!addresses)
        PyErr_NoMemory();
    for (; addresses && found < given; found++)
        if (!(addresses[found] = address_of(PySequence_Fast_GET_ITEM(tensors, found))))
            break;
    if (addresses && found == given)
        results = call(arguments, tensors, addresses);
    for (Py_ssize_t i = 0; i < found; i++)
        Py_DECREF(addresses[i]);
    PyMem_Free(addresses);
    Py_DECREF(tensors);
    return results;
}

static PyMethodDef methods[] = {{"replay", (PyCFunction)(void (*)(void))replay, METH_FASTCALL, replay_doc}, {NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mhc_ops_replay", NULL, -1, methods};

PyMODINIT_FUNC PyInit_mhc_ops_replay(void) {
    if (!(data_ptr = PyUnicode_InternFromString("data_ptr")) || !(calls = PyUnicode_InternFromString("calls")) ||
        !(enter_hook = PyUnicode_InternFromString("launch_enter_hook")) ||
        !(exit_hook = PyUnicode_InternFromString("launch_exit_hook")) ||
        !(run_name = PyUnicode_InternFromString("run")) || !(zero = PyLong_FromLong(0)))
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddIntConstant(module, "OF_PLAN", OF_PLAN) < 0 ||
                   PyModule_AddIntConstant(module, "OF_QUICK", OF_QUICK) < 0))
        Py_CLEAR(module);
    return module;
}
