// Stands in for the compiler's header of that name: emulate.h has declared everything.
#pragma once
