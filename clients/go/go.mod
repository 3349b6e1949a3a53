module lisa.example/lisa

go 1.22
