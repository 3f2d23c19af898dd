/* Replay.__call__ and Plan.run (replay.py) and Quick.__call__ (launch.py), without the interpreter.

   This file knows neither torch nor CUDA: it calls the same functions as the Python code to allocate tensors and to
   start kernels. Plans and launches are the tuples of the Python code. */
#include <Python.h>

/* The fields of Plan and Quick. */
enum { GIVEN, DEVICE, EMPTY, LAYOUTS, WORKSPACE, OFFSETS, NUMBERS, LAUNCHES, RESULTS, CURRENT_DEVICE, RAW_STREAM, OF_PLAN };
enum { LAUNCH, GRID, FIXED, SPREAD, SLOWLY, RUNTIME, DESCRIBED, OF_QUICK };

static PyObject *data_ptr, *enter_hook, *exit_hook, *calls, *run_name; /* names of attributes */
static PyObject *layout, *is_nested, *numel, *check, *is_contiguous, *contiguous;
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
    for (Py_ssize_t i = PyTuple_GET_SIZE(described) - 1; all && i >= 0; i--) { /* earlier places stay valid */
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
    if (PyTuple_Check(start) && PyTuple_GET_SIZE(start) == OF_QUICK) {
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

/* Returns the plan's stream. If another device is current, it returns NULL and *results has the result of Plan.run. */
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
    Py_ssize_t given = PyTuple_GET_SIZE(tensors), count = PyTuple_GET_SIZE(places);
    PyObject *results = PyTuple_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        Py_ssize_t place = PyLong_AsSsize_t(at(places, i));
        PyObject *result = Py_None;
        if (place >= 0)
            result = place < given ? at(tensors, place) : PyList_GET_ITEM(made, place - given);
        PyTuple_SET_ITEM(results, i, Py_NewRef(result));
    }
    return results;
}

/* Allocates the tensors and the scratch memory, and appends their addresses to `values`, which has room for all of them.
   *workspace: the tensor with the scratch memory. Returns the tensors. *held counts the addresses, also after an error. */
static PyObject *allocated(PyObject *plan, PyObject **values, Py_ssize_t *held, PyObject **workspace) {
    PyObject *layouts = at(plan, LAYOUTS), *offsets = at(plan, OFFSETS), *base = NULL;
    PyObject *made = PyList_New(0);
    for (Py_ssize_t i = 0; made && i < PyTuple_GET_SIZE(layouts); i++) {
        PyObject *tensor = PyObject_Call(at(plan, EMPTY), at(layouts, i), NULL);
        if (tensor && PyList_Append(made, tensor) == 0 && (values[*held] = address_of(tensor)))
            ++*held;
        else
            Py_CLEAR(made);
        Py_XDECREF(tensor);
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
    Py_ssize_t given = PyTuple_GET_SIZE(tensors), held = given, count = PyTuple_GET_SIZE(numbers);
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

/* The key of Replay.__call__: None if every tensor is there and aligned. */
static PyObject *key_of(PyObject **addresses, Py_ssize_t count) {
    PyObject *key = PyTuple_New(count);
    int usual = 1;
    for (Py_ssize_t i = 0; key && i < count; i++) {
        unsigned long long address = PyLong_AsUnsignedLongLong(addresses[i]);
        PyObject *part = NULL;
        if (address != (unsigned long long)-1 || !PyErr_Occurred())
            part = address ? PyLong_FromLong(address & 15) : Py_NewRef(Py_None);
        usual &= address && !(address & 15);
        if (part)
            PyTuple_SET_ITEM(key, i, part);
        else
            Py_CLEAR(key);
    }
    if (key && usual)
        Py_SETREF(key, Py_NewRef(Py_None));
    return key;
}

static PyObject *call(PyObject *const *replay, PyObject *tensors, PyObject **addresses) {
    PyObject *plans = replay[0], *function = replay[1], *first_call = replay[2], *results = NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
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
    PyObject *tensors = PySequence_Tuple(arguments[3]), *results = NULL;
    if (!tensors)
        return NULL;
    Py_ssize_t given = PyTuple_GET_SIZE(tensors), found = 0;
    PyObject **addresses = PyMem_New(PyObject *, given);
    if (!addresses)
        PyErr_NoMemory();
    for (; addresses && found < given; found++)
        if (!(addresses[found] = address_of(at(tensors, found))))
            break;
    if (addresses && found == given)
        results = call(arguments, tensors, addresses);
    for (Py_ssize_t i = 0; i < found; i++)
        Py_DECREF(addresses[i]);
    PyMem_Free(addresses);
    Py_DECREF(tensors);
    return results;
}

/* Whether guards may look at the tensor: strided, not nested. -1 for an error. */
static int readable(PyObject *tensor, PyObject *strided) {
    PyObject *own = PyObject_GetAttr(tensor, layout), *nested = NULL;
    int found = own ? own == strided : -1;
    if (found > 0)
        found = (nested = PyObject_GetAttr(tensor, is_nested)) ? PyObject_Not(nested) : -1;
    Py_XDECREF(own);
    Py_XDECREF(nested);
    return found;
}

/* What was found for tensors like these: a new reference, None if there is none, NULL for an error. */
static PyObject *found_for(PyObject *alike, PyObject *tensors) {
    PyObject *found = Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; found == Py_None && i < PyList_GET_SIZE(alike); i++) {
        PyObject *pair = Py_NewRef(PyList_GET_ITEM(alike, i)); /* another thread may clear the list */
        PyObject *method = PyObject_GetAttr(at(pair, 0), check);
        PyObject *fits = method ? PyObject_Call(method, tensors, NULL) : NULL;
        int yes = fits ? PyObject_IsTrue(fits) : -1;
        if (yes)
            Py_SETREF(found, yes > 0 ? Py_NewRef(at(pair, 1)) : NULL);
        Py_XDECREF(fits);
        Py_XDECREF(method);
        Py_DECREF(pair);
    }
    return found;
}

/* (what is kept for these, or None; the tensors; the key). words: of the key, but for how many elements there are */
static PyObject *kept_for(PyObject *calls_kept, PyObject *words, PyObject *tensors) {
    PyObject *number = NULL, *key = NULL, *of_guards = NULL, *alike = NULL, *found = NULL, *result = NULL;
    int known = 1;
    if (PyList_GET_SIZE(tensors)) {
        number = PyObject_CallMethodNoArgs(PyList_GET_ITEM(tensors, 0), numel);
        known = number && PyList_Append(words, number) == 0;
    }
    if (known && (key = PyList_AsTuple(words)) && (of_guards = PyList_AsTuple(tensors))) {
        alike = Py_XNewRef(PyDict_GetItemWithError(calls_kept, key)); /* another thread may drop it meanwhile */
        if (!PyErr_Occurred())
            found = alike ? found_for(alike, of_guards) : Py_NewRef(Py_None);
        if (found)
            result = PyTuple_Pack(3, found, tensors, key);
    }
    Py_XDECREF(number);
    Py_XDECREF(key);
    Py_XDECREF(of_guards);
    Py_XDECREF(alike);
    Py_XDECREF(found);
    return result;
}

/* As find_call of alike.py. kinds: (Tensor, Parameter, CONSTANTS, STRIDED) */
PyDoc_STRVAR(find_call_doc, "find_call(calls, prepare, chosen, arguments, kinds)\n--\n\nAs in alike.py.");

static PyObject *find_call(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 5 || !PyDict_Check(given[0]) || !PyDict_Check(given[3]) || !PyTuple_Check(given[4]))
        return PyErr_Format(PyExc_TypeError, "takes calls, prepare, chosen, arguments, kinds");
    PyObject *kinds = given[4], *words = PyList_New(0), *tensors = PyList_New(0), *result = NULL, *name, *argument;
    Py_ssize_t place = 0;
    int known = words && tensors && PyList_Append(words, given[1]) == 0 && PyList_Append(words, given[2]) == 0 ? 1 : -1;
    while (known > 0 && PyDict_Next(given[3], &place, &name, &argument)) {
        PyObject *kind = (PyObject *)Py_TYPE(argument);
        if (kind == at(kinds, 0) || kind == at(kinds, 1)) {
            known = readable(argument, at(kinds, 3));
            if (known > 0 && (PyList_Append(words, name) < 0 || PyList_Append(tensors, argument) < 0))
                known = -1;
        } else {
            known = PySet_Contains(at(kinds, 2), kind);
            if (known > 0 && (PyList_Append(words, name) < 0 || PyList_Append(words, kind) < 0 ||
                              PyList_Append(words, argument) < 0))
                known = -1;
        }
    }
    if (known > 0)
        result = kept_for(given[0], words, tensors);
    Py_XDECREF(words);
    Py_XDECREF(tensors);
    return known ? result : Py_NewRef(Py_None);
}

/* As find_op of alike.py. */
PyDoc_STRVAR(find_op_doc, "find_op(calls, op, arguments, are_tensors)\n--\n\nAs in alike.py.");

static PyObject *find_op(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 4 || !PyDict_Check(given[0]) || !PyTuple_Check(given[2]) || !PyTuple_Check(given[3]) ||
        PyTuple_GET_SIZE(given[2]) != PyTuple_GET_SIZE(given[3]))
        return PyErr_Format(PyExc_TypeError, "takes calls, op, arguments, are_tensors");
    PyObject *words = PyList_New(0), *tensors = PyList_New(0), *result = NULL;
    int failed = !words || !tensors || PyList_Append(words, given[1]) < 0;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(given[2]); i++) {
        PyObject *argument = at(given[2], i), *word = argument;
        if (at(given[3], i) == Py_True) {
            word = argument == Py_None ? Py_True : Py_False;
            failed = argument != Py_None && PyList_Append(tensors, argument) < 0;
        }
        failed = failed || PyList_Append(words, word) < 0;
    }
    if (!failed)
        result = kept_for(given[0], words, tensors);
    Py_XDECREF(words);
    Py_XDECREF(tensors);
    return result;
}

/* As find_like of alike.py. */
PyDoc_STRVAR(find_like_doc, "find_like(alike, kept, cotangents, strided)\n--\n\nAs in alike.py.");

static PyObject *find_like(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 4 || !PyList_Check(given[0]) || !PyTuple_Check(given[1]) || !PyTuple_Check(given[2]))
        return PyErr_Format(PyExc_TypeError, "takes alike, kept, cotangents, strided");
    PyObject *tensors = PySequence_List(given[1]), *there = PyList_New(0), *of_guards = NULL, *found = NULL;
    PyObject *result = NULL;
    int known = tensors && there ? 1 : -1;
    for (Py_ssize_t i = 0; known > 0 && i < PyTuple_GET_SIZE(given[1]); i++) {
        known = readable(at(given[1], i), given[3]);
        if (known > 0 && PyList_Append(there, at(given[1], i)) < 0)
            known = -1;
    }
    for (Py_ssize_t i = 0; known > 0 && i < PyTuple_GET_SIZE(given[2]); i++) {
        PyObject *cotangent = Py_NewRef(at(given[2], i));
        if (cotangent != Py_None) {
            PyObject *dense = PyObject_CallMethodNoArgs(cotangent, is_contiguous);
            if (!dense || dense == Py_False)
                Py_SETREF(cotangent, dense ? PyObject_CallMethodNoArgs(cotangent, contiguous) : NULL);
            Py_XDECREF(dense);
        }
        if (!cotangent || PyList_Append(tensors, cotangent) < 0 ||
            (cotangent != Py_None && PyList_Append(there, cotangent) < 0))
            known = -1;
        Py_XDECREF(cotangent);
    }
    if (known > 0 && (of_guards = PyList_AsTuple(there)) && (found = found_for(given[0], of_guards)))
        result = PyTuple_Pack(2, found, tensors);
    Py_XDECREF(tensors);
    Py_XDECREF(there);
    Py_XDECREF(of_guards);
    Py_XDECREF(found);
    return known ? result : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"replay", (PyCFunction)(void (*)(void))replay, METH_FASTCALL, replay_doc},
    {"find_call", (PyCFunction)(void (*)(void))find_call, METH_FASTCALL, find_call_doc},
    {"find_op", (PyCFunction)(void (*)(void))find_op, METH_FASTCALL, find_op_doc},
    {"find_like", (PyCFunction)(void (*)(void))find_like, METH_FASTCALL, find_like_doc},
    {NULL}};

static int execute(PyObject *module) {
    struct {
        PyObject **into;
        const char *name;
    } names[] = {{&data_ptr, "data_ptr"},
                 {&enter_hook, "launch_enter_hook"},
                 {&exit_hook, "launch_exit_hook"},
                 {&calls, "calls"},
                 {&run_name, "run"},
                 {&layout, "layout"},
                 {&is_nested, "is_nested"},
                 {&numel, "numel"},
                 {&check, "check"},
                 {&is_contiguous, "is_contiguous"},
                 {&contiguous, "contiguous"}};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (!(*names[i].into = PyUnicode_InternFromString(names[i].name)))
            return -1;
    if (!(zero = PyLong_FromLong(0)))
        return -1;
    return PyModule_AddIntConstant(module, "OF_PLAN", OF_PLAN) || PyModule_AddIntConstant(module, "OF_QUICK", OF_QUICK);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "mhc_ops_native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit_mhc_ops_native(void) {
    return PyModuleDef_Init(&definition);
}
